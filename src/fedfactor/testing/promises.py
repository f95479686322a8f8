"""What the library promises about every method. Each promise is a function that raises AssertionError if it is broken.

Promises take a method object and run it on the federation of `fedfactor.testing.federation`: convolutions, batch
norms, two capacities, clients of different sizes.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from fedfactor.client.work import filled_network
from fedfactor.engines import Done, Inline, Job
from fedfactor.nn.norms import with_statistics
from fedfactor.nn.state import weights_sha256
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import decode
from fedfactor.protocol.method import Method, Staged
from fedfactor.protocol.settings import Capacities
from fedfactor.protocol.setup import Setup, kept_of
from fedfactor.registry import create, names
from fedfactor.server.replies import Diverged, QuorumLost
from fedfactor.server.result import Result
from fedfactor.testing import federation
from fedfactor.testing.federation import CLIENTS, LEVELS, Recording, SmallNet, Tampering, data, outcome

Promise = Callable[[Method], None]


def check_method(method: str | Method) -> None:
    """Check all promises. Raise AssertionError with one line per promise that the method breaks.

    Args:
        method: A method object, or the name of a registered method, which then has its default settings.
    """
    made = create("methods", method) if isinstance(method, str) else method
    broken: dict[str, Exception] = {}
    for promise in PROMISES:
        try:
            promise(made)
        except Exception as error:  # whatever a hook raises breaks the promise too
            broken[promise.__name__] = error
    if broken:
        lines = [f"- {name}: {type(error).__name__}: {error}" for name, error in broken.items()]
        raise AssertionError(
            "\n".join([f"{made} breaks {len(broken)} of {len(PROMISES)} promises:", *lines])
        ) from next(iter(broken.values()))


def _run(method: Method, **settings: Any) -> Result:
    try:
        return federation.run(method, **settings)
    except (QuorumLost, Diverged) as error:
        raise AssertionError(str(error)) from error


def _trained(method: Method, *, even: bool = True, **settings: Any) -> Result:
    """Run without test data, where scores do not matter: it takes half of the time."""
    return _run(method, data=data(even, tested=False), **settings)


_kept: list[tuple[Method, Result]] = []


def _reference(method: Method) -> Result:
    """Return the run that several promises compare with; it is kept until another method object is checked."""
    if not _kept or _kept[0][0] is not method:
        _kept[:] = [(method, _run(method, evaluate_clients="all"))]
    return _kept[0][1]


# Any combination.


def runs_or_is_refused_with_every_optimizer_and_codec(method: Method) -> None:
    """Every optimizer and every codec trains the method, or `refuses` gives the reason why it cannot."""
    start = weights_sha256(_trained(method, rounds=0).server.tensors)
    for optimizer, codec in combinations(method):
        pair = f"optimizer {optimizer} with codec {codec}"
        reason = refusal(method, optimizer, codec)
        if reason is not None:
            _check_refused(method, optimizer, codec, reason)
            continue
        result = _trained(method, optimizer=optimizer, codec=codec, even=False)
        _check_no_failures(result, pair)
        if result.federation.setup.method.traits.space == "personal" or not result.server.tensors:
            assert result.federation.store.clients("client"), f"{pair}: no client keeps a model"
        else:
            assert weights_sha256(result.server.tensors) != start, f"{pair}: training did not change the server's model"
        for name, tensor in result.server.tensors.items():
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), f"{pair}: {name} is not finite"


def combinations(method: Method) -> Iterator[tuple[str, str]]:
    """Yield pairs of an optimizer and a codec: each optimizer and each codec at least once, other pairs per method."""
    optimizers, codecs = names("optimizers"), names("codecs")
    first = sum(map(ord, method.name))
    for place in range(max(len(optimizers), len(codecs))):
        yield optimizers[place % len(optimizers)], codecs[(first + place) % len(codecs)]


def refusal(method: Method, optimizer: str, codec: str = "float32") -> str | None:
    """Return why a combination is refused, or `None`."""
    return method.refuses(create("optimizers", optimizer), create("codecs", codec))


def _accepted_optimizers(method: Method) -> list[str]:
    found = [name for name in names("optimizers") if refusal(method, name) is None]
    assert "fedavg" in found, "refuses() rejects plain averaging, so there is nothing to test the method with"
    return found


def _accepted_codecs(method: Method) -> list[str]:
    found = [name for name in names("codecs") if refusal(method, "fedavg", name) is None]
    assert "float32" in found, "refuses() rejects the lossless codec, so there is nothing to test the method with"
    return found


def _check_refused(method: Method, optimizer: str, codec: str, reason: str) -> None:
    try:
        _run(method, optimizer=optimizer, codec=codec)
    except ValueError as error:
        assert reason in str(error), f"refused because {error!r}, but refuses() says {reason!r}"
    else:
        raise AssertionError(f"{optimizer} with {codec} runs although refuses() says {reason!r}")


def _check_no_failures(result: Result, what: str) -> None:
    failures = [failure for event in result.history for failure in event.get("failures", [])]
    assert not failures, f"{what}: client {failures[0]['client']} failed: {failures[0]['reason']}"


def runs_when_capacities_change_every_round(method: Method) -> None:
    """Clients can have another capacity in each round, and the run records the capacity that they train."""
    result = _trained(method, capacities=Capacities(LEVELS, dynamic=True), rounds=3, cohort=4)
    drawn = {level for event in result.history if event["event"] == "round" for level in event["capacities"]}
    assert drawn == set(LEVELS), f"the capacities of this run are {drawn}, expected {set(LEVELS)}"
    _check_no_failures(result, "capacities that change")
    setup, sizes = result.federation.setup, dict[float, set[int]]()
    for level in LEVELS:
        size = sum(parameter.numel() for parameter in setup.network(level).parameters())
        sizes.setdefault(setup.method.trained_capacity(level), set()).add(size)
    several = [f"{level:g}" for level, found in sizes.items() if len(found) > 1]
    assert not several, (
        f"trained_capacity() says {several[0]} of networks of different sizes: set Traits(adapts=True) if clients of "
        "less capacity get a smaller network"
    )


def _check_close(found: Tensor, expected: Tensor, tolerance: float, problem: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=min(tolerance, 1e-5), msg=lambda difference: f"{problem}. {difference}"
    )


# The same bits.


def gives_the_same_bits_for_the_same_seed(method: Method) -> None:
    """Two runs with one seed end with the same weights and the same private states; another seed gives others."""
    one, two, other = map(_hashes, (_reference(method), _trained(method), _trained(method, seed=6)))
    assert one == two, "two runs with the same seed differ: some random number does not come from the run's seed"
    assert one != other, "two runs with different seeds are the same"


def _hashes(result: Result) -> tuple[str, str]:
    found = result.summary
    return found["weights_sha256"], found["private_sha256"]


@dataclass(frozen=True)
class InAnotherProcess(Inline):
    """An engine whose clients have a copy of the setup, as in another process."""

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Run the jobs in order."""
        return super().run(pickle.loads(cloudpickle.dumps(setup)), jobs)


def shares_no_memory_with_its_clients(method: Method) -> None:
    """Clients in other processes give the same bits: messages and states hold all that they need."""
    elsewhere = _run(method, engine=InAnotherProcess(), evaluate_clients="all")
    assert _hashes(_reference(method)) == _hashes(elsewhere), (
        "clients in another process give other bits: the method object carries state"
    )


class _Interrupt(Exception):
    """Stops a run."""


def resumes_to_the_same_bits(method: Method) -> None:
    """A run that is interrupted and resumed ends like one that never stopped, private states included."""

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "committed" and event["round"] == 1:
            raise _Interrupt

    with TemporaryDirectory() as folder:
        with suppress(_Interrupt):
            _run(method, directory=folder, on_event=stop, evaluate_clients="all")
        resumed = outcome(_run(copy.deepcopy(method), directory=folder, evaluate_clients="all"))
    whole = outcome(_reference(method))
    differing = [key for key in whole if whole[key] != resumed[key]]
    assert not differing, f"a resumed run differs from one that was never interrupted in its {', '.join(differing)}"


# Messages.


def counts_the_bytes_that_are_sent(method: Method) -> None:
    """The reported bytes are the length of the encoded messages, with every codec."""
    for codec in _accepted_codecs(method):
        engine = Recording()
        totals = _trained(method, codec=codec, engine=engine, rounds=1, epochs=0).summary["totals"]
        # Messages that gather norm statistics are counted apart.
        for way, kind, messages in (("down", "train", engine.down), ("up", "trained", engine.up)):
            sent = sum(len(message) for message in messages if decode(message).kind == kind)
            counted = totals[f"bytes_{way}"]
            assert counted == sent > 0, f"codec {codec}: {sent} bytes were sent {way}, {counted} were reported"


def never_sends_private_tensors(method: Method) -> None:
    """A tensor of `private_names` is in no message, nor is what an optimizer keeps for it."""
    for optimizer in _accepted_optimizers(method):
        if optimizer != "fedavg" and not create("optimizers", optimizer).keeps_state:
            continue  # it sends what FedAvg sends
        engine = Recording()
        # Evaluation sends the same messages whatever the optimizer is.
        run = _run if optimizer == "fedavg" else _trained
        setup = run(method, optimizer=optimizer, engine=engine).federation.setup
        for round in range(2):
            form = setup.at(round)
            private = form.method.private_names(form.network(1.0))
            for message in map(decode, [*engine.up, *engine.down]):
                sent = {name.partition("/")[2].partition(":")[0] for name in message.tensors}
                assert message.fields["round"] != round or not private & sent, (
                    f"optimizer {optimizer}: a {message.kind} message holds the private {', '.join(private & sent)}"
                )


def starts_private_tensors_alike(method: Method) -> None:
    """Private tensors start with the same values on all clients."""
    result = _trained(method, epochs=0, rounds=1, cohort=CLIENTS, capacities=None)
    for name, tensor in result.federation.setup.at(0).kept(1.0).items():
        for client in range(CLIENTS):
            state = result.federation.store.read("client", client)
            kept = sections(decode(state).tensors)["kept"] if state else {}
            assert name in kept, f"client {client} does not keep its private {name}"
            assert torch.equal(kept[name], tensor), f"client {client} has another {name} before any training"


# Rounds.


def changes_nothing_without_training(method: Method) -> None:
    """With zero local epochs a round leaves the server as it was; only its form may change (`Staged`)."""
    start = _trained(method, rounds=0).server.tensors
    for optimizer in _accepted_optimizers(method):
        expected, result = start, _trained(method, optimizer=optimizer, epochs=0)
        setup = result.federation.setup
        for round in range(result.server.round):
            before, after = setup.at(round), setup.at(round + 1)
            if after is not before and isinstance(after.method, Staged):
                expected = after.method.convert(expected, before.network(1.0))
        for name, tensor in result.server.tensors.items():
            _check_close(tensor, expected[name], 1e-6, f"optimizer {optimizer}: {name} changed without training")


def learns_nothing_from_test_data(method: Method) -> None:
    """Other test data give other scores, and the same weights and private states."""
    honest = data()
    assert isinstance(honest.central, tuple)
    inputs, targets = honest.central
    other = replace(honest, central=(torch.zeros_like(inputs), (targets + 1) % 10))
    one, two = _reference(method), _run(method, data=other, evaluate_clients="all")
    assert one.history[-1]["all"] != two.history[-1]["all"], "scores do not depend on the test data"
    assert _hashes(one) == _hashes(two), "the result of training depends on the test data"


def loses_only_the_update_of_a_failing_client(method: Method) -> None:
    """A damaged upload costs its own update only, and the client keeps the state that it had before."""
    client = next(e for e in _reference(method).history if e["event"] == "round")["cohort"][1]
    silent, damaged = (
        _trained(method, rounds=1, engine=Tampering(client, change))
        for change in (lambda done: None, lambda done: replace(done, reply=b"\xff" * 100))
    )
    assert _hashes(silent) == _hashes(damaged), "a damaged upload has an effect that a missing one has not"
    for result in (silent, damaged):
        failed = [failure["client"] for event in result.history for failure in event.get("failures", [])]
        assert failed == [client], f"client {client} failed, but the clients {failed} are reported"
        store = result.federation.store
        assert store.read("client", client) is None, f"client {client} keeps a state of a round that does not count"
        assert client not in store.clients("server"), f"the server remembers an update of client {client}, which failed"


# Results.


def deploys_what_was_trained(method: Method) -> None:
    """Deployed models are made of ordinary layers, and compute what the client's network computes."""
    result = _reference(method)
    central = data().central
    assert isinstance(central, tuple)
    x = central[0][:7]
    for client in range(CLIENTS):
        model = result.client_model(client).eval()
        layers = {type(layer) for layer in model.modules()}
        strange = [layer for layer in layers if not layer.__module__.startswith(("torch.", SmallNet.__module__))]
        plain = result.federation.setup.method.traits.plain
        assert not (plain and strange), f"the model of client {client} holds {strange[0]}; Traits.plain says otherwise"
        network = client_network(result, client).eval()
        _check_close(model(x), network(x), 1e-4, f"client {client}'s model computes something else than its network")
    for level in LEVELS:
        shape = tuple(result.model_at(level).eval()(x).shape)
        assert shape == (7, 10), f"the model at capacity {level} returns {shape} for seven images of ten classes"


def client_network(result: Result, client: int) -> nn.Module:
    """Return a client's network, filled from the bytes of a job and of the client's state."""
    run, server = result.federation, result.server
    setup, who = run.setup.at(server.round), run.dispatch.participant(client, server.round)
    view = setup.method.prepare(server.tensors, {who.capacity: setup.network(who.capacity)}, training=False)
    (job,) = run.dispatch.jobs("evaluate", server, view, [who], run.store)
    kept = kept_of(run.setup, job.state, server.round)
    network = copy.deepcopy(filled_network(setup, decode(job.message), kept, training=False)[0])
    if setup.method.traits.calibrates:
        with_statistics(network, run.calibration(server).at(who.capacity))
    return network


PROMISES: tuple[Promise, ...] = (
    runs_or_is_refused_with_every_optimizer_and_codec,
    runs_when_capacities_change_every_round,
    gives_the_same_bits_for_the_same_seed,
    shares_no_memory_with_its_clients,
    resumes_to_the_same_bits,
    counts_the_bytes_that_are_sent,
    never_sends_private_tensors,
    starts_private_tensors_alike,
    changes_nothing_without_training,
    learns_nothing_from_test_data,
    loses_only_the_update_of_a_failing_client,
    deploys_what_was_trained,
)
"""All promises; pytest shows their names if a test is parametrised with them."""
