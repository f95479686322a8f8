"""Validation of replies: no part of a reply is used before it is validated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedfactor.nn import outer_layers
from fedfactor.nn.norms import batch_norms
from fedfactor.protocol.coding import decode_up, expected_up, sections
from fedfactor.protocol.message import LONGEST_HEADER, BadMessage, Message, NotFinite, expect
from fedfactor.protocol.method import Participant
from fedfactor.protocol.plan import Plan, Reply, Tensors
from fedfactor.protocol.setup import Setup
from fedfactor.task import Task


def check_report(
    task: Task, kind: str, message: Message, who: Participant, round: int, *, private: bool = False
) -> dict[str, Any]:
    """Return the fields of a reply. Raise BadMessage if kind, client, round or capacity is wrong, or a number.

    With `private`, clients tell nothing about their data, so there is no loss.
    """
    fields = message.fields
    wanted = {"client": who.client, "round": round, "capacity": who.capacity}
    same = all(type(fields.get(key)) is type(value) and fields[key] == value for key, value in wanted.items())
    if message.kind != kind or not same:
        got = {key: fields.get(key) for key in wanted}
        raise BadMessage(f"got a reply of kind {message.kind} for {got}, expected one of kind {kind} for {wanted}")
    if kind in ("trained", "calibrated"):
        samples = fields.get("samples")
        if type(samples) is not int or not 1 <= samples <= MOST_SAMPLES:
            raise BadMessage(f"samples must be an integer in [1, {MOST_SAMPLES}], got {samples!r}")
    if kind == "trained" and not private and not _is_number(loss := fields.get("loss")):
        wrong = f"the training loss must be a finite number, got {loss!r}"
        raise diverged(wrong) if isinstance(loss, float) else BadMessage(wrong)
    for key in ("before", "after", "scores"):
        if fields.get(key) is not None:
            _check_scores(task, fields[key])
    if "loss" in (fields.get("before") or {}) and "loss" not in (fields.get("after") or {"loss"}):
        raise diverged("the test loss was finite before the training and is not after it")
    return fields


DIVERGED = "training diverged"


def diverged(sign: str) -> BadMessage:
    """Return the error for a reply that shows that training diverged; `sign` is what shows it."""
    advice = "Try a smaller learning rate (lr), or gradient clipping (max_grad_norm), and check the inputs for NaN"
    return BadMessage(f"{DIVERGED}: {sign}. {advice}")


def _check_scores(task: Task, scores: object) -> None:
    known = {*task.measures.names, "examples"}
    if not isinstance(scores, dict) or not known >= scores.keys() or not all(map(_is_number, scores.values())):
        raise BadMessage(f"scores must be finite numbers named {', '.join(sorted(known))}")
    if task.decider.name not in scores:
        if "loss" not in scores and task.decider.name != "accuracy":  # evaluations leave out what is not finite
            raise diverged(f"the {task.decider.name} on the test data is not finite")
        raise BadMessage(f"scores must be finite numbers and include the {task.decider.name}")
    if not 0 <= scores.get("accuracy", 0) <= 1:
        raise BadMessage(f"an accuracy must lie in [0, 1], got {scores['accuracy']!r}")


def check_figures(figures: object, names: Sequence[str]) -> dict[str, float]:
    """Return the figures that a method's clients report. Raise BadMessage if names differ or numbers are not finite."""
    if not isinstance(figures, dict) or figures.keys() != set(names) or not all(map(_is_number, figures.values())):
        wanted = ", ".join(names) or "no figures"
        raise BadMessage(f"the reply must report finite numbers named {wanted}")
    return {name: float(figures[name]) for name in names}


def check_labels(labels: object, network: nn.Module) -> tuple[int, ...]:
    """Return the classes that a client says it has. Raise BadMessage if they are not ascending classifier rows."""
    classes = len(network.get_parameter(f"{outer_layers(network)[-1]}.weight"))
    if (
        not isinstance(labels, list)
        or not all(type(label) is int and 0 <= label < classes for label in labels)
        or labels != sorted({*labels})
        or not labels
    ):
        raise BadMessage(f"labels must be a list of ascending classes in [0, {classes})")
    return tuple(labels)


def _is_number(value: object) -> bool:
    # Compared, not converted: an integer in JSON may be too large for a float.
    return isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= sys.float_info.max


MOST_SAMPLES = 1 << 31


def check_statistics(message: Message, network: nn.Module) -> None:
    """Raise BadMessage if the tensors of a calibration do not fit the network's batch norms."""
    expect(message.tensors, _statistics(network), "statistics")


def _statistics(network: nn.Module) -> Tensors:
    """Return tensors with the names, shapes and dtypes that a calibration must have."""
    dtype = next(network.parameters()).dtype
    norms = batch_norms(network).items()
    return {name: torch.empty(2, norm.num_features, dtype=dtype, device="meta") for name, norm in norms}


@dataclass(frozen=True)
class SentJob:
    """A job that was sent to a client; its reply is validated against it."""

    who: Participant
    plan: Plan
    reference: Tensors
    """The download as the client decodes it."""
    extras: Tensors
    """Tensors that the optimizer sent with the model."""


def longest_reply(setup: Setup, kind: str, sent: SentJob) -> int:
    """Return the bytes of the longest valid reply to a job of this kind."""
    wanted: list[Tensors] = []
    if kind == "train":
        reference = setup.uploaded(sent.who.capacity, sent.reference)
        wanted.append(expected_up(setup.codec, setup.trained(sent.who.capacity), reference))
        wanted.append(setup.optimizer.expected(sent.extras))
    elif kind == "calibrate":
        wanted.append(_statistics(setup.network(sent.who.capacity)))
    return 8 + LONGEST_HEADER + sum(tensor.nbytes for tensors in wanted for tensor in tensors.values())


def check_upload(setup: Setup, message: Message, sent: SentJob, round: int) -> tuple[Reply, dict[str, Any]]:
    """Validate and decode an upload; return it with the fields of its message. Raise BadMessage if it is invalid."""
    who, trained = sent.who, setup.trained(sent.who.capacity)
    private = setup.privacy is not None
    report = check_report(setup.task, "trained", message, who, round, private=private)
    found = sections(message.tensors)
    model, extras = found.pop("model", {}), found.pop("extra", {})
    if found:
        raise BadMessage("the upload has tensors that belong to neither the model nor the optimizer")
    try:
        reference = setup.uploaded(who.capacity, sent.reference)
        norms = expect(model, expected_up(setup.codec, trained, reference), "upload")
        expect(extras, setup.optimizer.expected(sent.extras), "optimizer's upload")
        tensors = decode_up(setup.codec, trained, model, reference)
        # Coded tensors may decode to very large numbers, so check them again; uncoded tensors are checked already.
        known = {name for name, tensor in tensors.items() if tensor is model.get(name)}
        coded, wanted = ({n: t for n, t in some.items() if n not in known} for some in (tensors, reference))
        norms |= expect(coded, wanted, "decoded upload")
    except NotFinite as error:
        raise diverged(str(error)) from None
    figures = check_figures(report.get("figures", {}), () if private else setup.method.traits.reports)
    labels = check_labels(report.get("labels"), setup.network(who.capacity)) if setup.method.traits.sends_labels else ()
    norm, samples = sum(norms[name] for name in tensors), report["samples"]
    reply = Reply(who.client, who.capacity, samples, sent.plan, sent.reference, tensors, extras, figures, labels, norm)
    return reply, report
