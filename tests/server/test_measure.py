"""What is measured: by whom, on which data and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedfactor.engines import Pool
from tests.helpers.tiny import data, run, skewed


def test_before_and_after_are_measured_on_the_clients_own_test_data() -> None:
    result = run(rounds=1, evaluate_clients="all")
    event = result.history[-1]
    federation = result.federation
    start = run(rounds=0).model
    own = data().own_test(event["cohort"][0])
    assert own is not None
    expected = federation.setup.task.evaluate(start, own)["accuracy"]
    assert event["selected_before"]["each"][0] == pytest.approx(expected)
    assert event["selected_after"]["clients"] == 3 and event["all"]["clients"] == 6
    everyone = [
        federation.setup.task.evaluate(result.client_model(c), data().own_test(c))["accuracy"] for c in range(6)
    ]  # type: ignore[arg-type]
    assert event["all"]["each"] == pytest.approx(everyone)


@pytest.mark.parametrize("method", ["pfedpara", "fedper", "local", "fedamp"])
def test_all_clients_are_measured_with_their_private_part(method: str) -> None:
    """Measured in the round, before its commit, is the same as measured afterwards from the store."""
    result = run(method, rounds=2, evaluate_clients="all")
    task = result.federation.setup.task
    again = [task.evaluate(result.client_model(c), data().own_test(c))["accuracy"] for c in range(6)]  # type: ignore[arg-type]
    assert result.history[-1]["all"]["each"] == pytest.approx(again)
    assert "global" not in result.history[-1]
    assert "private" in result.history[0]["protocol"]["global"]


def test_evaluations_happen_when_they_are_due() -> None:
    result = run(rounds=5, evaluate_every=2)
    assert [e["round"] for e in result.history if "global" in e] == [2, 4, 5]
    assert ["selected_after" in e for e in result.history[1:]] == [False, True, False, True, True]
    assert not any("selected_after" in e for e in run(evaluate_clients="none").history)


def test_clients_take_norm_statistics_from_their_own_data() -> None:
    """With `own_norms`, scores and personal models use statistics of the client's training data, not the averaged ones."""
    result = run(data=skewed(), rounds=2, own_norms=True, evaluate_clients="all", batch_size=1000)
    model, client = result.client_model(2), 2
    inputs = result.federation.setup.task.data.of(client)[0]
    seen = {}
    model.bn1.register_forward_pre_hook(lambda module, x: seen.update(x=x[0]))  # type: ignore[operator]
    model.eval()(inputs)
    torch.testing.assert_close(model.bn1.running_mean, seen["x"].mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.bn1.running_var, seen["x"].transpose(0, 1).flatten(1).var(1), rtol=1e-4, atol=1e-5)
    averaged = run(data=skewed(), rounds=2, evaluate_clients="all", batch_size=1000)
    assert not torch.equal(result.server.tensors["bn1.running_mean"], averaged.server.tensors["bn1.running_mean"])
    assert result.history[-1]["macs"] == 2 * averaged.history[-1]["macs"]  # one epoch, and one pass for the statistics
    with pytest.raises(ValueError, match=r"own_norms: the network has no batch norms with running statistics"):
        run("heterofl", own_norms=True)


def test_metrics_are_the_same_in_worker_processes() -> None:
    """Workers measure parts of the central test set; a metric that is no sum needs it whole."""

    class Largest:  # local, so that workers need not import this module
        higher_is_better = True

        def reset(self) -> None:
            self.found = [0.0]

        def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
            self.found.append(float(preds.max()))

        def compute(self) -> float:
            return max(self.found) * len(self.found)

    sums: dict[str, Any] = {"margin": lambda outputs, batch: outputs.max(1).values - outputs.mean(1)}
    with Pool(2) as engine:
        for metrics, best in ((sums, "margin"), ({**sums, "largest": Largest()}, "largest")):
            options = {"metrics": metrics, "best": best, "higher_is_better": True, "evaluate_batch_size": 50}
            inline, pooled = run(**options), run(**options, engine=engine)
            for key in ("global", "selected_before", "selected_after"):
                assert pooled.history[-1][key] == inline.history[-1][key] and best in str(inline.history[-1][key])
