"""Settings of differential privacy, and a clipped sum by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedfactor.protocol.plan import HoldersMean, Piece, Reply
from fedfactor.protocol.privacy import Privacy, PrivateFold, protected
from fedfactor.registry import create

GIVEN: dict[str, Any] = {"clip": 1.0, "delta": 1e-5, "noise": 1.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epsilon": 8.0}, "give either noise, or epsilon"),
        ({"noise": None}, "give either noise, or epsilon"),
        ({"clip": "often"}, "clip"),
        ({"clip": 0.0}, "clip"),
        ({"delta": 1.0}, "delta"),
        ({"kind": "laplace"}, "kind"),
        ({"where": "client", "noise": None, "epsilon": 8.0}, "clients that add the noise need its size"),
        ({"where": "client", "clip": "adaptive"}, "an adaptive clip counts clients on the server"),
        ({"where": "client", "sampling": "poisson"}, "the server sees who sends an update"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Privacy(**{**GIVEN, **changes})


def test_the_default_sampling_depends_on_who_adds_the_noise() -> None:
    assert Privacy(**GIVEN).sampling == "poisson"
    assert Privacy(**GIVEN, where="client").sampling == "none"


def test_an_adaptive_clip_by_hand() -> None:
    """Andrew et al. 2021: C exp(-eta (b - gamma)), and z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), sigma_b = m / 20."""
    adaptive = Privacy(**{**GIVEN, "clip": "adaptive", "quantile": 0.5})
    assert adaptive.next_clip(0.1, 0.75) == pytest.approx(0.1 * math.exp(-0.05))
    assert adaptive.noise_on_sum(1.0, cohort=40) == pytest.approx((1 - 1 / 16) ** -0.5)
    assert adaptive.noise_on_sum(0.0, cohort=40) == 0.0
    with pytest.raises(ValueError, match=r"with 10 clients per round, an adaptive clip needs noise below 1, got 1;"):
        adaptive.noise_on_sum(1.0, cohort=10)


@pytest.mark.parametrize(
    ("method", "optimizer", "reason"),
    [
        ({"name": "fedamp"}, "fedavg", "fedamp keeps a model of each client on the server"),
        ({"name": "fedcac"}, "fedavg", "fedcac keeps a model of each client on the server"),
        ({"name": "hetlora"}, "fedavg", "hetlora weights them by the norm of the change"),
        ({"name": "fedhm", "tau": 1.0}, "fedavg", "fedhm weights them by the softmax of capacity"),
        ({"name": "heterofl", "label_rows": True}, "fedavg", "clients of heterofl tell the server which classes"),
        ({"name": "feddecomp", "distances": True}, "fedavg", "feddecomp records figures of single replies"),
        ({"name": "fedex_lora"}, "fedavg", "fedex_lora moves the base by products of single clients' updates"),
        ({"name": "flora"}, "fedavg", "flora moves the base by products of single clients' updates"),
        ({"name": "fedavg"}, "scaffold", "clients of scaffold upload a second update"),
        ({"name": "fedhm"}, "feddyn", None),
        ({"name": "feddecomp"}, "fedadam", None),
    ],
)
def test_what_would_release_more_is_refused(method: dict[str, Any], optimizer: str, reason: str | None) -> None:
    found = Privacy(**GIVEN).refuses(create("methods", **method), create("optimizers", optimizer))
    assert found is None if reason is None else reason in str(found)


def reply(client: int, change: list[float], piece: Piece) -> Reply:
    """A client that trained `w`, and whose buffer `seen` must stay where it is."""
    reference = {"w": torch.zeros(len(change)), "seen": torch.zeros(1)}
    tensors = {"w": torch.tensor(change), "seen": torch.ones(1) * 7}
    return Reply(
        client, float(len(change)), 1000 * client + 1, {"w": piece, "seen": Piece("seen")}, reference, tensors, {}
    )


def test_each_element_is_divided_by_its_expected_holders() -> None:
    """Two clients of capacity 4 and two of capacity 2, one of which does not answer; the fifth element is nobody's."""
    view = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), "seen": torch.zeros(1)}
    plans = {4.0: {"w": Piece("w", (4,)), "seen": Piece("seen")}, 2.0: {"w": Piece("w", (2,)), "seen": Piece("seen")}}
    fold = PrivateFold(
        HoldersMean(view, lambda reply: reply.samples),
        lambda _: frozenset({"w"}),
        plans,
        {4.0: 2.0, 2.0: 2.0},
        clip=5.0,
    )
    fold.add(reply(0, [3.0, 0.0, 4.0, 0.0], Piece("w", (4,))))  # norm 5: as it is
    fold.add(reply(1, [0.0, 0.0, 0.0, 10.0], Piece("w", (4,))))  # norm 10: halved
    fold.add(reply(2, [6.0, 8.0], Piece("w", (2,))))  # norm 10: halved
    assert (fold.within, fold.replies) == (1, 3)
    fold.add_noise(0.5, torch.Generator().manual_seed(3))
    noise = torch.randn(5, generator=torch.Generator().manual_seed(3)) * 0.5
    mean, held = fold.result()
    expected = view["w"] + (torch.tensor([6.0, 4.0, 4.0, 5.0, 0.0]) + noise) / torch.tensor([4.0, 4.0, 2.0, 2.0, 1.0])
    expected[4] = 5.0  # neither noise nor a change
    torch.testing.assert_close(mean["w"], expected)
    assert mean["seen"].item() == 0.0 and held["seen"] == 0
    assert isinstance(held["w"], torch.Tensor) and held["w"].tolist() == [4.0, 4.0, 2.0, 2.0, 0.0]


def test_a_client_clips_and_adds_noise_before_its_message_leaves() -> None:
    down = {"w": torch.ones(2), "seen": torch.zeros(1)}
    shared = {"w": torch.tensor([4.0, 5.0]), "seen": torch.ones(1)}
    settings = Privacy(clip=2.5, delta=1e-5, noise=2.0, where="client")
    noise = torch.randn(2, generator=torch.Generator().manual_seed(9)) * 5.0
    found = protected(shared, down, frozenset({"w"}), settings, seed=9)
    torch.testing.assert_close(found["w"], torch.tensor([2.5, 3.0]) + noise)
    assert found["seen"].item() == 0.0
