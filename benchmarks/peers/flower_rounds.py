"""A workload on Flower's simulation, used as documented: `python -m benchmarks.peers.flower_rounds NAME ROUNDS`."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.flower_client import app
from benchmarks.workloads import WORKLOADS

NAME, ROUNDS = sys.argv[1], int(sys.argv[2])
WORK = WORKLOADS[NAME]
MARKS: list[float] = []


server = ServerApp()


class Complete(FedAvg):
    """Averages like its base, and ends the run when a client failed: a round without its work is no measurement."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        answers = list(replies)
        failed = [answer for answer in answers if answer.has_error()]
        if failed or len(answers) != WORK.cohort:
            raise RuntimeError(f"{len(answers)} of {WORK.cohort} answered, {len(failed)} of them with an error")
        return super().aggregate_train(server_round, answers)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Average for some rounds, noting when each ends."""

    def mark(round: int, arrays: ArrayRecord) -> MetricRecord:
        MARKS.append(time.perf_counter())
        return MetricRecord({})

    strategy = Complete(
        fraction_train=WORK.cohort / WORK.users,
        fraction_evaluate=0.0,
        min_train_nodes=WORK.cohort,  # the first cohort may be drawn before all nodes are there
        min_available_nodes=WORK.users,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(WORK.model().state_dict()),
        num_rounds=ROUNDS,
        train_config=ConfigRecord({"workload": NAME}),
        evaluate_fn=mark,
    )


if __name__ == "__main__":
    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=WORK.users,
        backend_config={
            "init_args": {"num_cpus": 2, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    print(json.dumps([after - before for before, after in itertools.pairwise(MARKS)]))
