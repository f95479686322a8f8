"""The promises of the design, for everything that is registered."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedfactor.engines import Done
from fedfactor.factor import Hadamard, LowRank
from fedfactor.federation import QuorumLost, weights_sha256
from fedfactor.methods import FedHM, FedPer, HeteroFL
from fedfactor.nn import factorize
from fedfactor.optimizers import FedProx
from fedfactor.registry import create
from fedfactor.wire import Message, decode, encode
from tests.conformance.tiny import CODECS, METHODS, OPTIMIZERS, Recording, Tampering, Tiny, data, refusal, run

# 0. Any combination runs, or is refused with its reason.

PAIRS = [
    (method, optimizer, CODECS[(i + j) % len(CODECS)])
    for i, method in enumerate(METHODS)
    for j, optimizer in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("method", "optimizer", "codec"), PAIRS, ids=str)
def test_every_combination_runs_or_is_refused(method: str, optimizer: str, codec: str) -> None:
    reason = refusal(method, optimizer, codec)
    if reason:
        with pytest.raises(ValueError, match=method):
            run(method, optimizer=optimizer, codec=codec)
        return
    result = run(method, optimizer=optimizer, codec=codec, data=data(even=False))
    assert result.summary["totals"]["failures"] == 0
    start = weights_sha256(run(method, rounds=0).server.tensors)
    assert method == "local" or weights_sha256(result.server.tensors) != start
    assert all(torch.isfinite(t).all() for t in result.server.tensors.values() if t.is_floating_point())


def test_all_pairs_of_codecs_are_among_them() -> None:
    assert {(m, c) for m, _, c in PAIRS} == {(m, c) for m in METHODS for c in CODECS}
    assert {(o, c) for _, o, c in PAIRS} == {(o, c) for o in OPTIMIZERS for c in CODECS}


@pytest.mark.parametrize("method", METHODS)
def test_dynamic_capacities_run(method: str) -> None:
    from fedfactor.settings import Capacities

    result = run(method, capacities=Capacities({1.0: 0.5, 0.5: 0.5}, dynamic=True), rounds=3, cohort=4)
    drawn = [event["capacities"] for event in result.history if event["event"] == "round"]
    assert {level for cohort in drawn for level in cohort} == {1.0, 0.5}


# 1. Same seed, same bits.


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_bits_other_seed_others(method: str) -> None:
    one, two, other = run(method), run(method), run(method, seed=6)
    for key in ("weights_sha256", "private_sha256"):
        assert one.summary[key] == two.summary[key]
    assert (one.summary["weights_sha256"], one.summary["private_sha256"]) != (
        other.summary["weights_sha256"],
        other.summary["private_sha256"],
    )


def test_another_process_with_other_thread_settings_has_the_same_bits() -> None:
    code = "from tests.conformance.tiny import run; print(run('fedpara').summary['weights_sha256'])"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_num_threads(2); {code}"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == run("fedpara").summary["weights_sha256"]


def test_the_cohort_does_not_depend_on_the_method() -> None:
    cohorts = [[e["cohort"] for e in run(m).history if e["event"] == "round"] for m in ("fedavg", "pfedpara", "fedhm")]
    assert cohorts[0] == cohorts[1] == cohorts[2]


# 3. The reported bytes are the length of what was encoded.


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", METHODS)
def test_reported_bytes_are_encoded_bytes(method: str, codec: str) -> None:
    if refusal(method, "fedavg", codec):
        return
    engine = Recording()
    totals = run(method, codec=codec, engine=engine, evaluate_clients="none").summary["totals"]
    assert totals["bytes_down"] == sum(map(len, engine.down))
    assert totals["bytes_up"] == sum(map(len, engine.up))


def test_codecs_make_messages_smaller() -> None:
    up = {codec: run(codec=codec, evaluate_clients="none").summary["totals"]["bytes_up"] for codec in CODECS}
    assert up["int8"] < up["float16"] < up["float32"]
    assert up["fedpaq"] == pytest.approx(up["float16"], rel=0.01)
    assert up["topk"] < 0.35 * up["float32"]


# 4. A private tensor never appears in a decoded upload.


@pytest.mark.parametrize("optimizer", ["fedavg", "scaffold"])
@pytest.mark.parametrize("method", METHODS)
def test_private_tensors_never_leave(method: str, optimizer: str) -> None:
    if refusal(method, optimizer, "float32"):
        return
    engine = Recording()
    result = run(method, optimizer=optimizer, engine=engine)
    setup = result.federation.setup
    private = setup.method.private_names(setup.network(1.0))
    for message in [*map(decode, engine.up), *map(decode, engine.down)]:
        assert not private & {name.partition("/")[2].partition(":")[0] for name in message.tensors}
    assert bool(private) == (method in ("local", "fedper", "pfedpara"))


def test_private_factors_start_equal_and_do_not_depend_on_the_client() -> None:
    setup = run("pfedpara", rounds=0).federation.setup
    assert {name.rpartition(".")[2] for name in setup.kept(1.0)} == {"x2", "y2", "t2"}
    again = run("pfedpara", rounds=0).federation.setup
    assert all(torch.equal(tensor, again.kept(1.0)[name]) for name, tensor in setup.kept(1.0).items())


# 5. Nothing done, nothing changed; and every method's neutral setting is FedAvg.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_zero_local_steps_leave_the_server_as_it_was(method: str, optimizer: str) -> None:
    if refusal(method, optimizer, "float32"):
        return
    result = run(method, optimizer=optimizer, epochs=0)
    start = run(method, optimizer=optimizer, rounds=0).server.tensors
    for name, tensor in result.server.tensors.items():
        torch.testing.assert_close(tensor, start[name], rtol=1e-6, atol=1e-6, msg=name)


NEUTRAL = {
    "heterofl": (HeteroFL(scaler=False), {"capacities": {1.0: 1.0}}),
    "fedhm": (FedHM(), {"capacities": {1.0: 1.0}}),
    "fedper": (FedPer(head="none"), {}),
    "fedprox": ("fedavg", {"optimizer": FedProx(mu=0.0)}),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_setting_is_fedavg(name: str) -> None:
    method, settings = NEUTRAL[name]
    reference, neutral = run("fedavg"), run(method, **settings)
    start = run("fedavg", rounds=0)
    assert weights_sha256(reference.server.tensors) != weights_sha256(start.server.tensors)
    assert weights_sha256(neutral.server.tensors) == weights_sha256(reference.server.tensors)


@pytest.mark.parametrize(
    ("method", "scheme"),
    [("fedpara", Hadamard(gamma=0.1)), ("low_rank", LowRank(ratio=0.2))],
    ids=["fedpara", "low_rank"],
)
def test_a_factorised_method_is_fedavg_on_the_factorised_network(method: str, scheme: Hadamard | LowRank) -> None:
    given = run("fedavg", model=lambda: factorize(Tiny(), scheme))
    assert weights_sha256(given.server.tensors) == run(method).summary["weights_sha256"]


# 6. A client that dies, lies or is late costs its own update only.


def _tensors(done: Done, change: object) -> Done:
    assert done.reply is not None
    message = decode(done.reply)
    return replace(done, reply=encode(Message(message.kind, message.fields, change(message.tensors))))  # type: ignore[operator]


def _first(tensors: dict[str, torch.Tensor], change: object) -> dict[str, torch.Tensor]:
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.is_floating_point())
    return {**tensors, name: change(tensors[name])}  # type: ignore[operator]


def _fields(done: Done, **fields: object) -> Done:
    assert done.reply is not None
    message = decode(done.reply)
    return replace(done, reply=encode(Message(message.kind, {**message.fields, **fields}, message.tensors)))


LIES = {
    "nan": (lambda d: _tensors(d, lambda ts: _first(ts, lambda t: t * float("nan"))), "NaN or infinity"),
    "shape": (lambda d: _tensors(d, lambda ts: _first(ts, lambda t: t.flatten()[:-1])), "expected"),
    "dtype": (lambda d: _tensors(d, lambda ts: _first(ts, lambda t: t.double())), "expected torch.float32"),
    "name": (lambda d: _tensors(d, lambda ts: {**ts, "model/other": torch.ones(1)}), "unexpected other"),
    "missing": (lambda d: _tensors(d, lambda ts: dict(list(ts.items())[1:])), "missing"),
    "section": (lambda d: _tensors(d, lambda ts: {**ts, "secret": torch.ones(1)}), "neither"),
    "round": (lambda d: _fields(d, round=7), "expected a trained one"),
    "client": (lambda d: _fields(d, client=99), "expected a trained one"),
    "samples": (lambda d: _fields(d, samples=-3), "samples must be"),
    "loss": (lambda d: _fields(d, loss=float("nan")), "loss is nan"),
    "truncated": (lambda d: replace(d, reply=d.reply[:-5]), "lies at|belong to"),
    "garbage": (lambda d: replace(d, reply=b"\xff" * 100), "does not fit"),
    "dies": (lambda d: replace(d, reply=None, failure="worker killed"), "worker killed"),
    "silent": (lambda d: None, "did not answer"),
}


def _victim(method: str) -> int:
    return next(e for e in run(method, rounds=1).history if e["event"] == "round")["cohort"][1]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_only_the_liar(lie: str) -> None:
    change, reason = LIES[lie]
    client = _victim("fedavg")
    without = run(engine=Tampering(client, lambda done: None))
    result = run(engine=Tampering(client, change))
    failures = [f for event in result.history for f in event.get("failures", [])]
    assert failures and all(f["client"] == client for f in failures)
    import re

    assert re.search(reason, failures[0]["reason"]), failures[0]["reason"]
    assert result.summary["weights_sha256"] == without.summary["weights_sha256"]
    assert result.summary["totals"]["failures"] == len(failures)


@pytest.mark.parametrize("method", METHODS)
def test_a_rejected_reply_rolls_the_clients_state_back(method: str) -> None:
    client = _victim(method)
    lying = run(method, engine=Tampering(client, LIES["garbage"][0]), rounds=1)
    assert lying.federation.store.read("client", client) is None
    assert client not in lying.federation.store.clients("server")


def test_a_foreign_reply_is_rejected() -> None:
    seen: list[Done] = []

    def swap(done: Done) -> Done:
        return replace(seen[0], client=done.client)

    client = _victim("fedavg")

    class Swapping(Tampering):
        def run(self, setup, jobs):  # type: ignore[no-untyped-def]
            for done in super(Tampering, self).run(setup, jobs):
                seen[:] = seen or [done]
                yield swap(done) if done.client == client else done

    result = run(engine=Swapping(client, None), rounds=1)
    assert [f["client"] for f in result.history[-1]["failures"]] == [client]


def test_an_answer_from_someone_not_asked_is_counted_and_ignored() -> None:
    class Talking(Tampering):
        def run(self, setup, jobs):  # type: ignore[no-untyped-def]
            for done in super(Tampering, self).run(setup, jobs):
                yield done
                yield replace(done, client=77)

    result = run(engine=Talking(0, None), rounds=1)
    assert result.summary["weights_sha256"] == run(rounds=1).summary["weights_sha256"]
    assert {f["client"] for f in result.history[-1]["failures"]} == {77}


def test_below_the_quorum_the_run_stops_and_keeps_its_last_commit(tmp_path: Path) -> None:
    run(rounds=1, directory=tmp_path)
    clients = [c for e in run(rounds=2).history[2:] for c in e["cohort"]]
    with pytest.raises(QuorumLost, match=r"round 2: 2 of 3 .* quorum is 0.9 .*did not answer.*up to round 1"):
        run(rounds=2, directory=tmp_path, quorum=0.9, engine=Tampering(clients[0], lambda done: None))
    finished = run(rounds=2, directory=tmp_path)
    assert finished.summary["weights_sha256"] == run(rounds=2).summary["weights_sha256"]


# 7. What is deployed computes what was trained.


@pytest.mark.parametrize("method", METHODS)
def test_deployed_models_are_plain_and_compute_the_same(method: str) -> None:
    result = run(method)
    federation, setup = result.federation, result.federation.setup
    x = torch.randn(7, 1, 8, 8)
    for client in range(6):
        plain = result.client_model(client).eval()
        assert all(type(module).__module__.startswith(("torch.", "tests.")) for module in plain.modules())
        who = federation._participant(client, result.server.round)
        network = setup.network(who.capacity)  # still holds this client's tensors, as factors
        torch.testing.assert_close(plain(x), network.eval()(x), rtol=1e-4, atol=1e-5)
    for level in (1.0, 0.5):
        assert result.model_at(level).eval()(x).shape == (7, 10)


def test_static_norms_are_calibrated_on_all_clients() -> None:
    result = run(HeteroFL(static_norm=True))
    model = result.model_at(0.5).eval()
    assert model.bn1.running_mean is not None
    x = data().train[0][torch.cat(list(data().train_of))]
    inside: list[torch.Tensor] = []
    model.bn1.register_forward_pre_hook(lambda m, inputs: inside.append(inputs[0]))
    model(x)
    torch.testing.assert_close(model.bn1.running_mean, inside[0].mean((0, 2, 3)), rtol=1e-3, atol=1e-4)


def test_unknown_names_and_fields_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="did you mean 'fedpara'"):
        create("methods", "fedparra")
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        create("methods", "fedpara", gama=0.1)
    with pytest.raises(ValueError, match="one size only"):
        run("heterofl", model=Tiny())
