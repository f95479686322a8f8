"""Replies are validated before any part of them is used; the error names the tensor or the field."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfactor.nn.norms import batch_norms
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.coding import code_up, prefixed
from fedfactor.protocol.message import LONGEST_HEADER, BadMessage, Message
from fedfactor.protocol.method import Participant, shared_names
from fedfactor.protocol.plan import whole_plan
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.validation import (
    MOST_SAMPLES,
    SentJob,
    check_figures,
    check_report,
    check_statistics,
    check_upload,
    longest_reply,
)
from tests.helpers.tiny import Tiny, run

WHO = Participant(client=2, capacity=1.0, round=0)
FIELDS: dict[str, Any] = {"client": 2, "round": 0, "capacity": 1.0, "samples": 40, "loss": 0.5}
SCORES = {"accuracy": 0.5, "loss": 1.0}


@functools.cache
def setup(codec: str = "float32") -> Setup:
    """FedPer, whose classifier `fc` is private."""
    return run("fedper", rounds=0, codec=codec).federation.setup


def sent(codec: str = "float32") -> SentJob:
    network = setup(codec).network(1.0)
    shared = {name: tensors_of(network)[name].clone() for name in shared_names(setup(codec).method, network)}
    return SentJob(WHO, whole_plan(shared), shared, {})


def uploaded(codec: str = "float32") -> dict[str, Tensor]:
    """Return the tensors of an upload in which every trained weight has grown by 0.5."""
    job, trained = sent(codec), setup(codec).trained(1.0)
    grown = {name: tensor + 0.5 if name in trained else tensor for name, tensor in job.reference.items()}
    return prefixed("model", code_up(setup(codec).codec, trained, grown, job.reference, {}, torch.Generator())[0])


def check(tensors: dict[str, Tensor], codec: str = "float32", **fields: object) -> Any:
    return check_upload(setup(codec), Message("trained", {**FIELDS, **fields}, tensors), sent(codec), 0)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_valid_upload_is_decoded(codec: str) -> None:
    reply, report = check(uploaded(codec), codec, before=SCORES)
    assert (reply.client, reply.capacity, reply.samples, report["before"]) == (2, 1.0, 40, SCORES)
    assert not {"fc.weight", "fc.bias"} & set(reply.tensors)
    assert reply.tensors.keys() == sent().reference.keys()
    torch.testing.assert_close(reply.tensors["hidden.bias"], reply.reference["hidden.bias"] + 0.5, atol=0.005, rtol=0)


@pytest.mark.parametrize("codec", ["float32", "int8", "topk"])
def test_the_longest_reply_is_a_valid_upload_with_the_longest_header(codec: str) -> None:
    tensors = uploaded(codec)
    room = longest_reply(setup(codec), "train", sent(codec)) - 8 - LONGEST_HEADER
    assert room == sum(tensor.nbytes for tensor in tensors.values())
    assert longest_reply(setup(codec), "evaluate", sent(codec)) == 8 + LONGEST_HEADER
    statistics = 2 * 4 * sum(norm.num_features for norm in batch_norms(setup(codec).network(1.0)).values())
    assert longest_reply(setup(codec), "calibrate", sent(codec)) == 8 + LONGEST_HEADER + statistics > 8 + LONGEST_HEADER


BIAS = "model/hidden.bias"  # 32 numbers
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "shape": (
        lambda ts: {**ts, BIAS: ts[BIAS][:-1]},
        "upload: 'hidden.bias' is torch.float32 [31], expected torch.float32 [32]",
    ),
    "dtype": (
        lambda ts: {**ts, BIAS: ts[BIAS].double()},
        "upload: 'hidden.bias' is torch.float64 [32], expected torch.float32 [32]",
    ),
    "NaN": (
        lambda ts: {**ts, BIAS: ts[BIAS].index_fill(0, torch.tensor(7), torch.nan)},
        "upload: 'hidden.bias' holds NaN, infinity or numbers too large to square",
    ),
    "infinity": (lambda ts: {**ts, BIAS: ts[BIAS] / 0}, "upload: 'hidden.bias' holds NaN, infinity"),
    "huge": (lambda ts: {**ts, BIAS: ts[BIAS] * 0 + 3e38}, "upload: 'hidden.bias' holds NaN, infinity"),
    "missing": (
        lambda ts: {name: tensor for name, tensor in ts.items() if name != BIAS},
        "upload: missing hidden.bias, unexpected nothing",
    ),
    "private": (
        lambda ts: {**ts, "model/fc.weight": torch.zeros(10, 32)},
        "upload: missing nothing, unexpected fc.weight",
    ),
    "optimizer": (
        lambda ts: {**ts, "extra/hidden.bias": ts[BIAS]},
        "optimizer's upload: missing nothing, unexpected hidden.bias",
    ),
    "section": (lambda ts: {**ts, "secret": torch.ones(1)}, "belong to neither the model nor the optimizer"),
}


@pytest.mark.parametrize("lie", TENSORS)
def test_wrong_tensors_are_refused_by_name(lie: str) -> None:
    change, sentence = TENSORS[lie]
    with pytest.raises(BadMessage, match=re.escape(sentence)):
        check(change(uploaded()))


def test_a_code_that_decodes_to_infinity_is_refused() -> None:
    coded = uploaded("int8")
    coded["model/hidden.bias:scale"] = torch.tensor(3e38)
    with pytest.raises(BadMessage, match=r"decoded upload: 'hidden.bias' holds NaN, infinity"):
        check(coded, "int8")


REPORTS: dict[str, tuple[dict[str, object], str]] = {
    "round": ({"round": 7}, "expected one of kind trained for {'client': 2, 'round': 0, 'capacity': 1.0}"),
    "client": ({"client": 99}, "got a reply of kind trained for {'client': 99, 'round': 0, 'capacity': 1.0}"),
    "true is no client": ({"client": True}, "expected one of kind trained"),
    "1 is no capacity": ({"capacity": 1}, "expected one of kind trained"),
    "samples": ({"samples": -3}, f"samples must be an integer in [1, {MOST_SAMPLES}], got -3"),
    "many samples": ({"samples": 10**400}, "samples must be an integer"),
    "samples that are no number": ({"samples": True}, "samples must be an integer"),
    "loss": ({"loss": float("nan")}, "the training loss must be a finite number, got nan"),
    "huge loss": ({"loss": 10**400}, "the training loss must be a finite number, got 1000"),
    "huge accuracy": ({"after": {"accuracy": 10**400, "loss": 1.0}}, "scores must be finite numbers"),
    "no loss": ({"loss": None}, "the training loss must be a finite number, got None"),
    "diverged": (
        {"before": {"accuracy": 0.5, "loss": 1.0}, "after": {"accuracy": 0.1}},
        "training diverged: the test loss was finite before the training and is not after it",
    ),
    "scores": ({"before": {}}, "scores must be finite numbers and include the accuracy"),
    "words": ({"after": {"accuracy": "x", "loss": 1.0}}, "scores must be finite numbers"),
    "accuracy": ({"after": {"accuracy": 1e9, "loss": 1.0}}, "an accuracy must lie in [0, 1], got 1000000000.0"),
    "figures nobody asked for": ({"figures": {"x": 1.0}}, "the reply must report finite numbers named no figures"),
}


@pytest.mark.parametrize("lie", REPORTS)
def test_wrong_fields_are_refused_by_name(lie: str) -> None:
    fields, sentence = REPORTS[lie]
    with pytest.raises(BadMessage, match=re.escape(sentence)):
        check(uploaded(), **fields)


def test_a_reply_of_another_kind_is_refused() -> None:
    with pytest.raises(BadMessage, match=r"got a reply of kind evaluated for .*, expected one of kind trained"):
        check_report(setup().task, "trained", Message("evaluated", FIELDS), WHO, 0)
    assert (
        check_report(setup().task, "evaluated", Message("evaluated", {**FIELDS, "scores": SCORES}), WHO, 0)["scores"]
        == SCORES
    )


def test_scores_are_those_of_the_task() -> None:
    error = {"metrics": {"mae": lambda outputs, batch: 0.0}, "best": "mae", "higher_is_better": False}
    task = run(rounds=0, **error).federation.setup.task

    def report(**scores: float) -> None:
        check_report(task, "evaluated", Message("evaluated", {**FIELDS, "scores": scores}), WHO, 0)

    report(accuracy=0.5, loss=1.0, mae=-3.0, examples=2.0)
    with pytest.raises(BadMessage, match="finite numbers named accuracy, examples, loss, mae"):
        report(accuracy=0.5, loss=1.0, mae=3.0, who=2.0)
    with pytest.raises(BadMessage, match="include the mae"):
        report(accuracy=0.5, loss=1.0)
    with pytest.raises(BadMessage, match="training diverged: the mae on the test data is not finite"):
        report(accuracy=0.5)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.just(10**400)
    | st.floats()
    | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*SCORES, "x"]), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "before", "scores"]), JSON), st.sampled_from(["trained", "evaluated"]))
def test_any_fields_give_a_report_or_a_typed_error(changes: dict[str, Any], kind: str) -> None:
    try:
        found = check_report(setup().task, kind, Message(kind, {**FIELDS, **changes}), WHO, 0)
    except BadMessage:
        return
    assert (found["client"], found["round"], found["capacity"]) == (2, 0, 1.0)
    assert kind == "evaluated" or (1 <= found["samples"] <= MOST_SAMPLES and abs(found["loss"]) < float("inf"))


@pytest.mark.parametrize(
    "figures",
    [{}, {"bias": 1.0, "more": 1.0}, {"bias": float("nan")}, {"bias": 10**400}, {"bias": "x"}, [1.0], {"bias": True}],
    ids=str,
)
def test_figures_must_be_those_that_the_method_names(figures: object) -> None:
    assert check_figures({"bias": 1}, ["bias"]) == {"bias": 1.0}
    with pytest.raises(BadMessage, match="the reply must report finite numbers named bias"):
        check_figures(figures, ["bias"])


def test_statistics_must_fit_the_networks_norms() -> None:
    right = {"bn1": torch.zeros(2, 8), "bn2": torch.zeros(2, 16)}
    check_statistics(Message("calibrated", {}, right), Tiny())
    for wrong, sentence in (
        ({**right, "bn1": torch.zeros(2, 7)}, r"'bn1' is torch.float32 \[2, 7\], expected torch.float32 \[2, 8\]"),
        ({**right, "bn2": torch.full((2, 16), torch.inf)}, "'bn2' holds NaN, infinity"),
        ({"bn1": right["bn1"]}, "missing bn2, unexpected nothing"),
    ):
        with pytest.raises(BadMessage, match=f"statistics: {sentence}"):
            check_statistics(Message("calibrated", {}, wrong), Tiny())
