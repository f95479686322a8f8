"""Audits of run directories and of federations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from fedfactor.audit.attack import Attack, Colours, NothingToAttack, matched, observe, reconstruct, uploaded_weights
from fedfactor.audit.result import AttackResult, AuditResult
from fedfactor.checks import check_number
from fedfactor.protocol.message import decode
from fedfactor.protocol.settings import check_device_here
from fedfactor.rng import torch_rng
from fedfactor.runs.directory import RunError
from fedfactor.runs.open import Run
from fedfactor.runs.tasks import task_of
from fedfactor.server.federation import Federation
from fedfactor.server.state import Server


def audit(
    directory: Path | str,
    attack: Attack | None = None,
    *,
    rounds: Sequence[int] = (),
    clients: int = 20,
    data_dir: Path | str | None = None,
    device: str = "cpu",
    on_start: Callable[[int], None] = lambda iterations: None,
    on_iteration: Callable[[], None] = lambda: None,
    on_attack: Callable[[AttackResult], None] = lambda result: None,
) -> AuditResult:
    """Attack the clients of a run.

    Args:
        directory: The run directory.
        attack: Settings of the attack.
        rounds: Rounds to attack, among those that the recipe lists as `run.keep_rounds`. Default: all of them.
        clients: How many clients to attack, from the first one on.
        data_dir: Where the data sets are.
        device: Where to compute.
        on_start: Called once with the total number of iterations.
        on_iteration: Called after each iteration.
        on_attack: Called with each result.

    Raises:
        RunError: If the run has kept no round, or not the requested one.
        NothingToAttack: If the data are not pictures, or the method uploads no trained weight.
    """
    attack, run = attack or Attack(), Run(directory)
    check_number("clients", clients, 1, whole=True)
    check_device_here(device)
    if not run.kept:
        raise RunError(
            f"{directory} has kept no round to attack: repeat the run with run.keep_rounds, for example "
            "--set run.keep_rounds=[10,20,30,40,50]"
        )
    kept = [Run(directory, round) for round in rounds or run.kept]  # raises RunError for a round that was not kept
    task, _ = task_of(run.recipe, data_dir)
    colours = Colours.of(task.data)
    chosen = range(min(clients, task.data.clients))
    on_start(len(kept) * len(chosen) * attack.restarts * attack.iterations)
    found: list[AttackResult] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for the same bits on all machines
    try:
        for one in kept:
            state = one.rebuilt(task, device)
            for result in attack_clients(state.federation, state.server, chosen, attack, colours, on_iteration):
                found.append(result)
                on_attack(result)
    finally:
        torch.set_num_threads(threads)
    return AuditResult(str(directory), str(run.recipe.method), attack, found)


def attack_clients(
    federation: Federation,
    server: Server,
    clients: Sequence[int],
    attack: Attack,
    colours: Colours,
    on_iteration: Callable[[], None] = lambda: None,
) -> Iterator[AttackResult]:
    """Attack what clients would upload in the next round."""
    setup, now, data = federation.setup, federation.setup.at(server.round), federation.setup.task.data
    asked = [federation.dispatch.participant(client, server.round) for client in clients]
    networks = {who.capacity: now.network(who.capacity) for who in asked}
    view = now.method.prepare(server.tensors, networks, training=True)
    for job in federation.dispatch.jobs("train", server, view, asked, federation.store):
        if not uploaded_weights(setup, decode(job.message)):
            raise NothingToAttack(f"{setup.method.name} uploads no trained weight, so there is nothing to attack")
        stored, targets = data.of(job.client)
        own = colours.pictures(data.transform.test(stored).float())
        rng = torch_rng(attack.seed, "audit-images", client=job.client)  # the same pictures in all rounds
        where = torch.randperm(len(targets), generator=rng)[: attack.images]
        labels = targets[where]
        observed = observe(setup, job, attack, data.transform.test(stored[where]), labels)
        pictures, off = reconstruct(setup, observed, attack, colours, on_iteration)
        if attack.mode == "gradient":
            own, targets = own[where], labels
        originals = own[matched(pictures, labels, own, targets)]
        yield AttackResult(server.round, job.client, labels.tolist(), originals, pictures, off)
