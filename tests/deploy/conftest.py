"""A deployment for all tests that need no other: its start takes a quarter of a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedfactor.runs.flower.local import Deployment


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink with TLS and four nodes, `0` to `3`; each keeps its states in a folder of its name in `states`."""
    folder = tmp_path_factory.mktemp("shared")
    with Deployment(folder / "flower") as found:
        for client in range(4):
            found.join(str(client), {"client": client, "state-dir": str(folder / "states" / str(client))})
        yield found
