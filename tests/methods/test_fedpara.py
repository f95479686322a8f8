"""FedPara and pFedPara in the loop: what is sent, and that the options really act."""

from __future__ import annotations

import pytest
import torch

from fedfactor.factor import Hadamard, jacobian_correction
from fedfactor.methods import FedPara, PFedPara
from fedfactor.nn import composed_once, factor_weights
from fedfactor.protocol.message import decode
from tests.helpers.tiny import Recording, run


def test_pfedpara_sends_first_factors_biases_and_norms_never_a_composed_weight() -> None:
    engine = Recording()
    run(PFedPara(), engine=engine)
    names = {name.removeprefix("model/") for reply in engine.up for name in decode(reply).tensors}
    factored = {"conv2", "hidden"}  # one input channel, and ten outputs, are too few to factorise
    for layer in factored:
        core = {f"{layer}.t1"} if layer == "conv2" else set()
        sent = {name for name in names if name.startswith(f"{layer}.")}
        assert sent - {f"{layer}.bias"} == {f"{layer}.x1", f"{layer}.y1"} | core
    assert {"conv1.weight", "conv1.bias", "hidden.bias", "bn1.weight", "bn1.running_mean", "fc.weight"} <= names
    assert not any(name.endswith((".x2", ".y2", ".t2")) for name in names)


def test_private_factors_train_and_differ_between_clients() -> None:
    result = run(PFedPara(), cohort=6, rounds=1)
    states = [decode(result.federation.store.read("client", client) or b"").tensors for client in (0, 1)]
    start = result.federation.setup.kept(1.0)
    for name in ("hidden.x2", "conv2.t2"):
        assert not torch.equal(states[0][f"kept/{name}"], states[1][f"kept/{name}"])
        assert not torch.equal(states[0][f"kept/{name}"], start[name])


@pytest.mark.parametrize(
    "method", [FedPara(tanh=True), FedPara(jacobian=1.0), FedPara(tanh=True, jacobian=1.0)], ids=str
)
def test_options_act_on_the_result(method: FedPara) -> None:
    plain, changed = run(FedPara()), run(method)
    assert plain.summary["weights_sha256"] != changed.summary["weights_sha256"]
    assert changed.summary["totals"]["failures"] == 0


def test_the_jacobian_correction_is_added_to_the_loss_for_every_layer() -> None:
    result = run(FedPara(), rounds=0)
    setup = result.federation.setup
    network = setup.network(1.0)
    examples = setup.task.data.of(0)
    batch = (examples[0][:8], examples[1][:8])

    class Ctx:
        task, lr = setup.task, 0.1

        @staticmethod
        def gradients(loss: torch.Tensor, of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return dict(zip(of, torch.autograd.grad(loss, list(of.values()), retain_graph=True), strict=True))

    with torch.no_grad():
        network.eval()
    plain = FedPara().objective(network, batch, Ctx())  # type: ignore[arg-type]
    corrected = FedPara(jacobian=2.0).objective(network, batch, Ctx())  # type: ignore[arg-type]
    with composed_once(network) as composed:
        loss = setup.task.loss(network(batch[0]), batch)
    expected = loss.detach()
    for name, gradient in Ctx.gradients(loss, composed).items():
        layer = factor_weights(network)[name]
        assert isinstance(layer.scheme, Hadamard)
        expected = expected + jacobian_correction(layer.scheme, layer.factors, layer.shape, gradient, 0.1, 2.0).detach()
    assert float(corrected.detach()) == pytest.approx(float(expected))
    assert float(corrected.detach()) > float(plain.detach())


def test_composing_once_computes_the_same_as_composing_at_every_use() -> None:
    network = run(FedPara(), rounds=0).federation.setup.network(1.0).eval()
    x = torch.randn(3, 1, 8, 8)
    expected = network(x)
    with composed_once(network):
        torch.testing.assert_close(network(x), expected)
    torch.testing.assert_close(network(x), expected, rtol=0, atol=0)
