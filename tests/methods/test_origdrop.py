"""OrigDrop: the first channels, averaged over their holders."""

from __future__ import annotations

import torch
from torch import nn

from fedfactor.methods import OrigDrop, Participant
from fedfactor.protocol.plan import Reply, pull
from tests.helpers.folding import folded
from tests.helpers.tiny import run


def test_origdrop_by_hand() -> None:
    """Keep ratios 1/4 and 1/2 of four kernels: held by both, by one, by nobody; examples do not count."""
    server = {"fc.weight": torch.full((1, 4), 10.0)}
    method, replies = OrigDrop(), []
    for keep, samples, value in ((0.25, 100, 1.0), (0.5, 1, 4.0)):
        small = nn.ModuleDict({"fc": nn.Linear(int(4 * keep), 1, bias=False)})
        plan = method.plan(server, Participant(0, keep, 0), small, torch.Generator())
        down = pull(server, plan)
        replies.append(Reply(0, keep, samples, plan, down, {n: t + value for n, t in down.items()}, {}))
    mean, held = folded(method, server, replies)
    assert mean["fc.weight"].tolist() == [[12.5, 14.0, 10.0, 10.0]]
    assert held["fc.weight"].tolist() == [[2, 1, 0, 0]]


def test_origdrop_is_really_smaller_and_keeps_what_nobody_held() -> None:
    result, start = (run(OrigDrop(), capacities={0.25: 1.0}, rounds=n) for n in (2, 0))
    assert result.federation.setup.network(0.25).conv2.weight.shape == (4, 2, 3, 3)
    new, old = result.server.tensors["conv2.weight"], start.server.tensors["conv2.weight"]
    assert (new[:4, :2] != old[:4, :2]).all()
    assert torch.equal(new[4:], old[4:]) and torch.equal(new[:, 2:], old[:, 2:])
    assert not any("running" in name for name in result.server.tensors)
    assert result.model.bn1.running_mean is None and result.model.fc.in_features == 8
    assert run(OrigDrop(static_norm=True), capacities={0.25: 1.0}).model.bn1.running_mean is not None
