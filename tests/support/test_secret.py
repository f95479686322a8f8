"""Secret seeds: drawn once, readable by their owner only, and never replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfactor.support.secret import secret_seed


def test_a_seed_is_drawn_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path, other = tmp_path / "checkpoint" / "secret", tmp_path / "secret"
    seed = secret_seed(path, fresh=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret_seed(path, fresh=True) == secret_seed(path, fresh=False) == seed != secret_seed(other, fresh=True)


def test_a_lost_seed_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="restore it from a backup"):
        secret_seed(tmp_path / "secret", fresh=False)
    (tmp_path / "secret").write_text("seven")
    with pytest.raises(ValueError, match="missing or damaged"):
        secret_seed(tmp_path / "secret", fresh=True)
