"""FedCAC: masks, overlaps and a round of three clients by hand; personal models measured and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedfactor.methods import FedCAC, Participant
from fedfactor.methods.fedcac import MASK, collaborators, critical, overlaps
from fedfactor.protocol.message import decode
from fedfactor.protocol.plan import Reply, whole_plan
from fedfactor.protocol.states import HeldTensors, pack
from fedfactor.server.store import MemoryStore
from tests.helpers.folding import commit, folded
from tests.helpers.tiny import Recording, data, lasting, run

START = torch.ones(4)
TRAINED = [torch.tensor(values) for values in ([1.5, 0.9, 1.0, 1.2], [1.4, 1.0, 0.8, 1.3], [1.0, 0.4, 1.6, 1.0])]
METHOD = FedCAC(tau=0.5, beta=2)
PLAN = whole_plan(["w"])


def replies(samples: int = 1) -> list[Reply]:
    return [Reply(i, 1.0, samples, PLAN, {"w": START}, {"w": trained}, {}) for i, trained in enumerate(TRAINED)]


def held() -> HeldTensors:
    store = MemoryStore()
    commit(store, 1, {"server": {reply.client: bytes(pack(METHOD.remember(reply))) for reply in replies()}}, b"", {})
    return HeldTensors(store, "server")


def mix(client: int, round: int) -> list[float]:
    server, _ = folded(METHOD, {"w": START}, replies())
    down = METHOD.download(server, Participant(client, 1.0, round), PLAN, held(), nn.Identity())
    found: list[float] = down["w"].tolist()
    return found


def test_masks_of_three_clients_by_hand() -> None:
    """c = (.75, .09, 0, .24), (.56, 0, .16, .39), (0, .24, .96, 0): the two largest of each are critical."""
    masks = [critical(START, trained, 0.5).int().tolist() for trained in TRAINED]
    assert masks == [[1, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0]]
    assert overlaps(held()).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_a_round_of_three_clients_by_hand() -> None:
    """Mean overlap 1/3, so T_1 = 2/3: clients 0 and 1 share their critical parameters, client 2 keeps its own."""
    assert mix(0, round=1) == pytest.approx([1.45, 0.766667, 1.133333, 1.25], abs=1e-6)
    assert mix(1, round=1) == pytest.approx([1.45, 0.766667, 1.133333, 1.25], abs=1e-6)
    assert mix(2, round=1) == pytest.approx([1.3, 0.4, 1.6, 1.166667], abs=1e-6)


def test_after_beta_rounds_critical_parameters_are_private() -> None:
    assert mix(0, round=2) == pytest.approx([1.45, 0.766667, 1.133333, 1.25], abs=1e-6)  # the pair most alike
    assert mix(0, round=3) == pytest.approx([1.5, 0.766667, 1.133333, 1.2], abs=1e-6)


def test_a_newcomer_gets_the_global_model() -> None:
    assert mix(9, round=1) == pytest.approx([1.3, 0.766667, 1.133333, 1.166667], abs=1e-6)


def test_masks_at_their_limits() -> None:
    start, trained = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 2.0])
    assert critical(start, trained, 1.0).tolist() == [False, False, False, True]  # only what moved
    assert not critical(start, start, 0.5).any() and not critical(start, trained, 0.0).any()
    assert critical(start, torch.full((4,), 2.0), 0.25).all()  # ties are in
    assert critical(torch.zeros(()), torch.ones(()), 1.0).shape == ()


def test_overlaps_of_masks_of_different_sizes() -> None:
    """|M_1| = 1, |M_2| = 3, one in common: 1 - 2/2 = 0 and 1 - 2/6 = 2/3; without any mask 0."""
    masks = {0: [1, 0, 0, 0], 1: [1, 1, 1, 0], 2: [0, 0, 0, 0]}
    found = overlaps({client: {MASK + "w": torch.tensor(mask).bool()} for client, mask in masks.items()})
    torch.testing.assert_close(found[:2, :2], torch.tensor([[1.0, 0.0], [2 / 3, 1.0]], dtype=torch.float64))
    assert not found[2].any()
    assert collaborators(torch.ones(1, 1), [7], 7, 0.5) == [7]
    alike = torch.full((3, 3), 0.7, dtype=torch.float64)
    assert collaborators(alike, [0, 1, 2], 1, 1.0) == [0, 1, 2]


def test_overlaps_are_the_same_however_many_entries_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {client: {MASK + "w": torch.rand(7, 11) < 0.4} for client in range(5)}
    whole = overlaps(masks)
    monkeypatch.setattr("fedfactor.methods.fedcac.CHUNK", 13)
    assert torch.equal(overlaps(masks), whole) and len(set(whole.flatten().tolist())) > 5


def test_without_critical_parameters_it_is_fedavg() -> None:
    plain, ours = run("fedavg", data=data(even=False)), run(FedCAC(tau=0.0), data=data(even=False))
    assert ours.server.tensors and set(plain.server.tensors) - set(ours.server.tensors) == {
        name for name in plain.server.tensors if "running" in name or "tracked" in name
    }
    assert all(torch.equal(tensor, plain.server.tensors[name]) for name, tensor in ours.server.tensors.items())


def test_personal_models_are_mixed_in_every_round_the_first_included() -> None:
    """What goes down in round 2 is what round 1 made of the clients' models, never the initial model."""
    engine = Recording()
    result = run("fedcac", cohort=6, engine=engine, evaluate_clients="none")
    start = run("fedcac", rounds=0).server.tensors["hidden.weight"]
    second = [decode(message) for message in engine.down if decode(message).fields["round"] == 1]
    weights = [message.tensors["model/hidden.weight"] for message in second]
    assert len(second) == 6 and all((weight == start).float().mean() < 0.5 for weight in weights)
    assert any(not torch.equal(weights[0], weight) for weight in weights[1:])
    assert not any("running" in name for message in second for name in message.tensors)
    assert result.federation.store.clients("server") == list(range(6))


def test_clients_are_measured_with_the_models_the_round_gave_them() -> None:
    result = run("fedcac", evaluate_clients="all", rounds=2)
    task = result.federation.setup.task
    own = [task.evaluate(result.client_model(client), task.data.own_test(client))["accuracy"] for client in range(6)]  # type: ignore[arg-type]
    assert result.history[-1]["all"]["each"] == pytest.approx(own)


def test_what_the_server_holds_of_clients_is_resumed(tmp_path: Path) -> None:
    run("fedcac", rounds=1, directory=tmp_path, cohort=6)
    stored = sorted(path.name.rpartition(".")[0] for path in (tmp_path / "checkpoint" / "server").rglob("*.1.*"))
    assert stored == [f"{client}.1" for client in range(6)]  # then the hash of the file
    resumed, whole = run("fedcac", directory=tmp_path, cohort=6), run("fedcac", cohort=6)
    assert lasting(resumed) == lasting(whole)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tau must lie in \[0, 1\]"):
        FedCAC(tau=1.5)
    with pytest.raises(ValueError, match="beta must be above 0"):
        FedCAC(beta=0)
