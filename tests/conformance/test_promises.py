"""The promises of the design, for everything that is registered."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedfactor.engines import Done
from fedfactor.factor import Hadamard, LowRank
from fedfactor.methods import FedHM, FedPer, FedRep, HeteroFL, Participant
from fedfactor.nn import factorize
from fedfactor.nn.norms import with_statistics
from fedfactor.optimizers import FedProx
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import Message, decode, encode
from fedfactor.registry import create
from fedfactor.server.federation import Diverged, Federation, QuorumLost
from fedfactor.server.state import Server, weights_sha256
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
        with pytest.raises(ValueError, match=re.escape(reason)):
            run(method, optimizer=optimizer, codec=codec)
        return
    result = run(method, optimizer=optimizer, codec=codec, data=data(even=False))
    assert result.summary["totals"]["failures"] == 0
    start, setup = weights_sha256(run(method, rounds=0).server.tensors), result.federation.setup
    if setup.method.traits.space == "personal" or not result.server.tensors:  # the models are with the clients
        assert result.federation.store.clients("client")
    else:
        assert weights_sha256(result.server.tensors) != start
    assert all(torch.isfinite(t).all() for t in result.server.tensors.values() if t.is_floating_point())


def test_all_pairs_of_codecs_are_among_them() -> None:
    assert {(m, c) for m, _, c in PAIRS} == {(m, c) for m in METHODS for c in CODECS}
    assert {(o, c) for _, o, c in PAIRS} == {(o, c) for o in OPTIMIZERS for c in CODECS}


@pytest.mark.parametrize("method", METHODS)
def test_dynamic_capacities_run(method: str) -> None:
    from fedfactor.protocol.settings import Capacities

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
    # Calibration is counted apart.
    assert totals["bytes_down"] == sum(len(m) for m in engine.down if decode(m).kind == "train")
    assert totals["bytes_up"] == sum(len(m) for m in engine.up if decode(m).kind == "trained")
    assert totals["bytes_down"] > 0


def test_calibration_is_counted_apart_both_ways() -> None:
    engine = Recording()
    event = run(HeteroFL(static_norm=True), engine=engine, rounds=1).history[-1]
    moved = sum(map(len, engine.down)) + sum(map(len, engine.up))
    assert event["bytes_calibration"] == moved - event["bytes_down"] - event["bytes_up"] > 0


def test_codecs_make_messages_smaller() -> None:
    up = {codec: run(codec=codec, evaluate_clients="none").summary["totals"]["bytes_up"] for codec in CODECS}
    assert up["int8"] < up["float16"] < up["float32"]
    assert up["fedpaq"] == pytest.approx(up["float16"], rel=0.01)
    assert up["topk"] < 0.35 * up["float32"]


# 4. A private tensor never appears in a decoded upload.


PRIVATE = {"local", "fedper", "fedrep", "fedbn", "lg_fedavg", "pfedpara", "feddecomp", "fedrod", "fedcac", "pfedgate"}


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
    assert bool(private) == (method in PRIVATE)


@pytest.mark.parametrize("method", sorted(PRIVATE))
def test_private_tensors_start_equal_on_all_clients(method: str) -> None:
    result = run(method, epochs=0, rounds=1, cohort=6, capacities=None)
    start = result.federation.setup.kept(1.0)
    assert start
    for client in range(6):
        state = result.federation.store.read("client", client)
        kept = sections(decode(state or b"").tensors)["kept"]
        assert all(torch.equal(kept[name], tensor) for name, tensor in start.items())


def test_private_factors_of_pfedpara_and_of_feddecomp() -> None:
    for method, factors in (("pfedpara", {"x2", "y2", "t2"}), ("feddecomp", {"a", "b"})):
        assert {name.rpartition(".")[2] for name in run(method, rounds=0).federation.setup.kept(1.0)} == factors


# 5. Nothing done, nothing changed; and every method's neutral setting is FedAvg.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_zero_local_steps_leave_the_server_as_it_was(method: str, optimizer: str) -> None:
    if refusal(method, optimizer, "float32"):
        return
    chosen = create("methods", method)  # without a change of form, which cuts ranks off
    result = run(chosen, optimizer=optimizer, epochs=0)
    start = run(chosen, optimizer=optimizer, rounds=0).server.tensors
    for name, tensor in result.server.tensors.items():
        torch.testing.assert_close(tensor, start[name], rtol=1e-6, atol=1e-6, msg=name)


NEUTRAL = {
    "heterofl": (HeteroFL(scaler=False, static_norm=False), {"capacities": {1.0: 1.0}}),
    "fedhm": (FedHM(), {"capacities": {1.0: 1.0}}),
    "fedper": (FedPer(head=""), {}),
    "fedrep": (FedRep(head="", head_epochs=0), {}),
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


@pytest.mark.parametrize("method", METHODS)
def test_a_mean_is_over_the_clients_of_the_round(method: str) -> None:
    """Clients that sat out do not count, and norm statistics are averaged like everything else."""
    engine = Recording()
    result = run(method, engine=engine, capacities=None, evaluate_clients="none")
    last = [decode(m) for m in engine.up if decode(m).kind == "trained" and decode(m).fields["round"] == 1]
    assert {message.fields["client"] for message in last} == set(result.history[-1]["cohort"])
    if result.federation.setup.method.traits.space != "slice" or method == "local":
        return
    server = {name.removesuffix("@1"): tensor for name, tensor in result.server.tensors.items()}  # FLANC's full width
    sent = [sections(message.tensors)["model"] for message in last]
    assert any(name.endswith("bias") for name in sent[0])
    for name in sent[0]:
        mean = torch.stack([tensors[name].double() for tensors in sent]).mean(0)
        torch.testing.assert_close(server[name].double(), mean, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_test_data_move_nothing(method: str) -> None:
    """No schedule, no choice of a round and no state looks at what a model is measured on."""
    honest = data()
    assert honest.central is not None
    x, y = honest.central
    other = replace(honest, central=(torch.rand_like(x), (y + 1) % 10))
    one, two = (run(method, data=which, evaluate_clients="all") for which in (honest, other))
    assert one.history[-1]["all"] != two.history[-1]["all"]
    for key in ("weights_sha256", "private_sha256"):
        assert one.summary[key] == two.summary[key]


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
    "nan": (lambda d: _tensors(d, lambda ts: _first(ts, lambda t: t * float("nan"))), "NaN, infinity"),
    "huge": (lambda d: _tensors(d, lambda ts: _first(ts, lambda t: t * 0 + 3e38)), "too large to square"),
    "shape": (lambda d: _tensors(d, lambda ts: _first(ts, lambda t: t.flatten()[:-1])), "expected"),
    "dtype": (lambda d: _tensors(d, lambda ts: _first(ts, lambda t: t.double())), "expected torch.float32"),
    "name": (lambda d: _tensors(d, lambda ts: {**ts, "model/other": torch.ones(1)}), "unexpected other"),
    "missing": (lambda d: _tensors(d, lambda ts: dict(list(ts.items())[1:])), "missing"),
    "section": (lambda d: _tensors(d, lambda ts: {**ts, "secret": torch.ones(1)}), "neither"),
    "round": (lambda d: _fields(d, round=7), "expected a trained one"),
    "client": (lambda d: _fields(d, client=99), "expected a trained one"),
    "samples": (lambda d: _fields(d, samples=-3), "samples must be"),
    "many samples": (lambda d: _fields(d, samples=10**400), "samples must be"),
    "true": (lambda d: _fields(d, client=True), "expected a trained one"),
    "scores": (lambda d: _fields(d, before={}), "scores must be numbers"),
    "words": (lambda d: _fields(d, after={"accuracy": "x", "loss": 1.0}), "scores must be numbers"),
    "accuracy": (lambda d: _fields(d, after={"accuracy": 1e9, "loss": 1.0}), "cannot be"),
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
    assert re.search(reason, failures[0]["reason"]), failures[0]["reason"]
    assert result.summary["weights_sha256"] == without.summary["weights_sha256"]
    assert result.summary["totals"]["failures"] == len(failures)


def test_a_code_that_decodes_to_infinity_is_rejected() -> None:
    client = _victim("fedavg")

    def inflate(done: Done) -> Done:
        return _tensors(
            done, lambda ts: {n: torch.full_like(t, 3e38) if n.endswith(":scale") else t for n, t in ts.items()}
        )

    result = run(codec="int8", engine=Tampering(client, inflate))
    failures = [f for event in result.history for f in event.get("failures", [])]
    assert failures and all("too large to square" in f["reason"] for f in failures)


@pytest.mark.parametrize("lie", ["garbage", "round", "silent", "dies"])
def test_lies_in_evaluation_and_calibration_cost_only_the_liar(lie: str) -> None:
    client = _victim("heterofl")
    settings = {"evaluate_clients": "all", "rounds": 1}
    honest = run(HeteroFL(static_norm=True), **settings)
    result = run(HeteroFL(static_norm=True), engine=Tampering(client, LIES[lie][0]), **settings)
    assert result.history[-1]["all"]["clients"] == honest.history[-1]["all"]["clients"] - 1
    assert "1" in result.history[-1]["global"]


def test_a_round_that_is_not_finite_is_not_committed(tmp_path: Path) -> None:
    class Exploding(FedProx):
        def step(self, step):  # type: ignore[no-untyped-def]
            return {name: tensor * float("inf") for name, tensor in step.mean.items()}, step.state

    with pytest.raises(Diverged, match=r"round 1: the server's .* is no longer finite; everything up to round 0"):
        run(optimizer=Exploding(), directory=tmp_path)
    assert (tmp_path / "checkpoint" / "current").read_text() == "round-0"


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


def _as_the_client_has_it(federation: Federation, server: Server, who: Participant) -> torch.nn.Module:
    """Fill a client's network the long way: through the bytes of a job and of its state."""
    setup = federation.setup
    view = setup.method.prepare(server.tensors, {who.capacity: setup.network(who.capacity)}, training=False)
    (job,) = federation.dispatch.jobs("evaluate", server, view, [who], federation.store)
    network = copy.deepcopy(setup.network(who.capacity))
    kept = sections(decode(job.state).tensors)["kept"] if job.state else setup.kept(who.capacity)
    setup.method.load(network, sections(decode(job.message).tensors).get("model", {}), kept, training=False)
    if setup.method.traits.calibrates:
        with_statistics(network, federation.calibration(server).at(who.capacity))
    return network


@pytest.mark.parametrize("method", METHODS)
def test_deployed_models_are_plain_and_compute_the_same(method: str) -> None:
    result = run(method)
    federation = result.federation
    x = torch.randn(7, 1, 8, 8)
    for client in range(6):
        plain = result.client_model(client).eval()
        if federation.setup.method.traits.plain:
            assert all(type(module).__module__.startswith(("torch.", "tests.")) for module in plain.modules())
        who = federation.dispatch.participant(client, result.server.round)
        network = _as_the_client_has_it(federation, result.server, who)
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


def test_methods_that_would_silently_be_fedavg_are_refused() -> None:
    plain = torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(16, 10))
    with pytest.raises(ValueError, match="has no layer 'fc' to keep private; its layers are 0, 1, 2"):
        run("fedper", model=plain)
    for method in ("fedpara", "pfedpara"):
        with pytest.raises(ValueError, match=f"{method} finds no layer to factorise.*2: full rank takes"):
            run(method, model=plain)
    with pytest.raises(ValueError, match="a binary task has none"):
        run(HeteroFL(masked_loss=True), kind="binary")


def test_frozen_parameters_stay_as_they_are() -> None:
    model = Tiny()
    model.conv1.weight.requires_grad_(False)
    result = run(model=model, capacities={1.0: 1.0}, optimizer="scaffold", codec="fedpaq")
    assert torch.equal(result.server.tensors["conv1.weight"], model.conv1.weight)
    assert not result.model.conv1.weight.requires_grad and result.model.conv2.weight.requires_grad


@pytest.mark.parametrize("settings", [{"optimizer": "fedadam"}, {"codec": "topk"}, {"codec": "float16"}], ids=str)
def test_tied_weights_stay_tied(settings: dict[str, str]) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            self.b.weight = self.a.weight
            self.fc = torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.b(self.a(x.flatten(1)).relu()).relu())

    engine = Recording()
    result = run(model=Tied, engine=engine, **settings)
    model = result.model
    assert model.a.weight is model.b.weight
    sent = {name.partition(":")[0] for reply in engine.up for name in decode(reply).tensors}
    assert "model/a.weight" in sent and "model/b.weight" not in sent


def test_unknown_names_and_fields_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="did you mean 'fedpara'"):
        create("methods", "fedparra")
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        create("methods", "fedpara", gama=0.1)
    with pytest.raises(ValueError, match="one size only"):
        run("heterofl", model=Tiny())
