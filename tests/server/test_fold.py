"""What a round keeps of its replies."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfactor.engines import Done
from fedfactor.methods import FedAvg
from fedfactor.protocol.plan import HoldersMean, Reply, Tensors
from fedfactor.registry import create
from fedfactor.server.federation import QuorumLost
from fedfactor.server.state import private_sha256
from fedfactor.server.store import DiskStore
from tests.helpers.tiny import Tampering, run


@dataclass(frozen=True)
class Watching(FedAvg):
    """FedAvg that counts how many replies are in memory whenever one is added."""

    alive: list[int] = field(default_factory=list, compare=False)
    seen: list[Any] = field(default_factory=list, compare=False, repr=False)

    def fold(self, server: Tensors, view: Tensors, networks: Any) -> HoldersMean:
        return HoldersMean(view, self.weight, self._watched)

    def _watched(self, reply: Reply) -> Reply:
        gc.collect()
        self.seen.append(weakref.ref(reply.tensors["fc.weight"]))
        self.alive.append(sum(one() is not None for one in self.seen))
        return reply


def test_a_round_never_holds_more_than_two_replies() -> None:
    """The one that is added, and the one before it, which the engine may not have dropped yet."""
    method = Watching()
    run(method, cohort=6, rounds=2)
    assert len(method.alive) == 12 and max(method.alive) <= 2


def test_client_states_are_not_kept_until_the_commit(tmp_path: Path) -> None:
    """They are on disk when their client has answered, and count only when the round does."""
    found: list[tuple[int, int]] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] in ("answered", "committed"):
            found.append((event["round"], len(list(tmp_path.glob("checkpoint/client/*/*")))))

    run("fedper", cohort=3, rounds=1, directory=tmp_path, on_event=listen)
    assert found == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 3)]


@pytest.mark.parametrize("method", ["fedper", "fedamp"])
def test_a_round_below_the_quorum_leaves_no_state_behind(method: str, tmp_path: Path) -> None:
    run(method, rounds=1, directory=tmp_path)
    before = private_sha256(DiskStore(tmp_path / "checkpoint", writing=False))
    cohort = run(method, rounds=2).history[-1]["cohort"]
    broken = Tampering(cohort[0], lambda done: replace(done, reply=None, failure="died"))
    with pytest.raises(QuorumLost):
        run(method, rounds=2, directory=tmp_path, engine=broken, quorum=1.0)
    assert private_sha256(DiskStore(tmp_path / "checkpoint", writing=False)) == before
    resumed, whole = run(method, rounds=2, directory=tmp_path).summary, run(method, rounds=2).summary
    assert all(resumed[key] == whole[key] for key in ("private_sha256", "weights_sha256"))


def test_a_federation_that_failed_can_run_again() -> None:
    """States of the failed round do not become part of the next one."""
    whole = run("fedper", rounds=1)
    client, failing = whole.history[-1]["cohort"][0], [True]

    def change(done: Done) -> Done:
        return replace(done, reply=None, failure="died") if failing else done

    start = run("fedper", rounds=0, engine=Tampering(client, change), quorum=1.0)
    federation = start.federation
    federation.rounds = replace(federation.rounds, rounds=1)
    with pytest.raises(QuorumLost):
        federation.run()
    assert federation.store.clients("client") == [] != federation.store.staged().clients("client")
    failing.clear()
    del federation.journal.events[1:]  # as opening a journal on disk does
    assert torch.equal(federation.run().tensors["hidden.weight"], whole.server.tensors["hidden.weight"])


def test_scaffold_sums_what_clients_send_over_their_slices() -> None:
    """The server's control variate after one round is the mean of the clients' over the population (all start at 0)."""
    result = run("heterofl", optimizer=create("optimizers", "scaffold"), rounds=1, cohort=6)
    c = result.server.optimizer["c"]["hidden.weight"]
    assert c.abs().sum() > 0 and c.shape == result.server.tensors["hidden.weight"].shape
