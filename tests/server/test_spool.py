"""A temporary file for bytes that are needed again."""

from __future__ import annotations

from pathlib import Path

from fedfactor.server.spool import Spool


def test_bytes_come_back_in_any_order_and_the_file_has_no_name(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number, data in enumerate((b"one", bytearray(b""), memoryview(b"three"))):
        spool.put(number, data)
    assert [bytes(spool.read(number)) for number in (2, 0, 1)] == [b"three", b"one", b""]
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_emptied_with_the_last_bytes() -> None:
    spool = Spool(None)
    spool.put(1, b"a" * 1000)
    spool.put(2, b"b" * 10)
    assert spool.take(1) == b"a" * 1000 and spool.take(2) == b"b" * 10
    spool.put(1, b"again")
    assert spool._file.seek(0, 2) == 5 and spool.take(1) == b"again"
