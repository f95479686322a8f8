"""Rounds that are disturbed for a long time: `python -m tests.soak.soak pool 60`, or `flower-local`, and the minutes.

`fedfactor run` works in a process of its own, and is started again with `--resume` whenever it ends. Meanwhile processes
are killed at random moments, the disk is full for a while, and the clock jumps; one in 16 replies is damaged or much too
large. In the second half, only the processes that train are killed, so that the others get old. At the end,

- the hashes are those of a run that nobody disturbed, without the replies that the disturbed run has lost,
- on the pool, only damaged replies are lost,
- `fedfactor run` never ended without a reason, and left no process behind,
- memory, open files and threads of old processes have not grown.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fedfactor.engines import Done, Inline, Job
from fedfactor.protocol.message import decode
from fedfactor.protocol.setup import Setup
from fedfactor.runs.directory import committed
from fedfactor.runs.execute import run
from fedfactor.runs.recipe import override, resolve
from tests.helpers.command import fedfactor_process
from tests.helpers.deployment import HASHES, events, words_of
from tests.soak.faults.sitecustomize import damage_of

FAULTS = Path(__file__).parent / "faults"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """How an engine is disturbed."""

    clients: int
    sleep: float
    """Seconds that a client waits before it trains, so that the machine has time for other work."""
    every: dict[str, float]
    """Mean number of seconds between two disturbances of a kind: the role of a process to kill, `disk` or `clock`."""
    full: float
    """Seconds for which the disk is full."""
    loses: bool
    """Whether killing a process that trains loses a reply."""


SETTINGS = {
    "pool": Setting(
        4, 3.0, {"worker": 30, "forkserver": 600, "server": 450, "disk": 900, "clock": 120}, full=15, loses=False
    ),
    "flower-local": Setting(
        3, 1.0,
        {"ClientApp": 120, "SuperNode": 300, "ServerApp": 900, "SuperLink": 900, "server": 900, "disk": 900, "clock": 450},
        full=20, loses=True,
    ),
}  # fmt: skip
OLD = 10
"""Minutes after which a process must have stopped growing."""
TRAINING = ("worker", "ClientApp")
"""Processes that train: they are killed in the second half, too."""
FARTHEST = 1500
"""Seconds by which the clock may be wrong, in both directions."""
ROLES = {
    "supervisor.py": "supervisor", "flwr-clientapp": "ClientApp", "flower-supernode": "SuperNode", "superlink.py": "SuperLink",
    "flwr-serverapp": "ServerApp", "flower-superexec": "SuperExec", "flwr-supernode": "SuperNode",
}  # fmt: skip


def recipe(clients: int) -> dict[str, Any]:
    """Return the tables of a recipe with private states, control variates and a lossy codec; it never ends by itself."""
    return {
        "name": "soak",
        "seed": 5,
        "data": {"name": "digits", "test_share": 0.9},
        "partition": {"kind": "iid", "clients": clients},
        "model": {"name": "tests.helpers.tiny:Tiny"},
        "method": {"name": "pfedpara"},
        "optimizer": {"name": "scaffold"},
        "codec": {"name": "topk"},
        "train": {
            "rounds": 10**6,
            "cohort": clients,
            "batch_size": 32,
            "lr": 0.005,
            "max_grad_norm": 1.0,
            "quorum": 0.1,
        },
        "evaluate": {"every": 10**6, "clients": "none"},
    }


@dataclass(frozen=True, order=True)
class Strike:
    """A disturbance, and when it is due in seconds."""

    at: float
    kind: str


def plan(setting: Setting, seconds: float, rng: random.Random) -> list[Strike]:
    """Draw the disturbances of a soak, each kind at least once."""
    strikes = []
    for kind, mean in setting.every.items():
        span = 0.95 * seconds if kind in TRAINING else seconds / 2
        strikes += [Strike(rng.uniform(0.02 * seconds, span), kind) for _ in range(max(1, round(span / mean)))]
    return sorted(strikes)


@dataclass
class Watched:
    """What a process has used, from its start to its end."""

    role: str
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)
    """Seconds of the soak, megabytes of its own, open files, threads."""

    @property
    def minutes(self) -> float:
        """How long it has been watched."""
        return (self.samples[-1][0] - self.samples[0][0]) / 60

    def used(self, column: int) -> tuple[float, float]:
        """Return the medians of the second and of the last quarter of its life: in the first one, it warms up."""
        quarter = len(self.samples) // 4
        values = [sample[column] for sample in self.samples]
        return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])

    @property
    def grown(self) -> list[str]:
        """What has grown: memory by more than a tenth and 4 MB, files or threads by more than 2. Empty for young ones."""
        if self.minutes < OLD:
            return []
        memory, *counts = (self.used(column) for column in (1, 2, 3))
        found = ["memory"] if memory[1] > 1.1 * memory[0] + 4 else []
        return found + [name for name, (a, b) in zip(("files", "threads"), counts, strict=True) if b > a + 2]


class Disturbed:
    """A run that is disturbed, and what is found about it."""

    def __init__(self, engine: str, folder: Path, seed: int = 0) -> None:
        self.engine, self.folder, self.setting = engine, folder, SETTINGS[engine]
        self.out, self.log = folder / "run", tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115 - its disk is never full
        self.rng = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.watched: dict[tuple[int, float], Watched] = {}
        self.excused, self.full_until, self.starts, self.hit = False, 0.0, 0, -1
        self.process: subprocess.Popen[bytes] | None = None
        self.begin = time.monotonic()
        tables = recipe(self.setting.clients)
        words = [f"{key} = {value!r}" for key, value in tables.items() if not isinstance(value, dict)]
        for name, table in tables.items():
            words += (
                [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())] if isinstance(table, dict) else []
            )
        folder.mkdir(parents=True)
        (folder / "soak.toml").write_text("\n".join(words).replace("'", '"'))
        self.faults = folder / "faults"
        self.set_faults()
        library = folder / "faults.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, FAULTS / "faults.c", "-ldl"], check=True)
        self.environment = {
            **os.environ, "SOAK_FAULTS": str(self.faults), "SOAK_SLEEP": str(self.setting.sleep), "LD_PRELOAD": str(library),
            "PYTHONPATH": os.pathsep.join([str(FAULTS), str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def set_faults(self, clock: int = 0, full: bool = False) -> None:
        """Say by how much the clock is wrong, and whether the disk is full. The file is mapped: its place stays."""
        with self.faults.open("r+b" if self.faults.exists() else "wb") as file:
            file.write(struct.pack("qq", clock, self.folder.stat().st_dev if full else 0))
        self.clock, self.full = clock, full

    def check_faults(self) -> None:
        """Raise if a process of the run would not notice a wrong clock or a full disk."""
        self.set_faults(FARTHEST, full=True)
        code = "import os, sys, time; print(int(time.time())); os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), b'x')"
        words = [sys.executable, "-c", code, str(self.folder / "written")]
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, check=False)
        self.set_faults()
        ahead = int(done.stdout) - time.time()
        assert FARTHEST - 60 < ahead <= FARTHEST, f"the clock is {ahead:.0f} seconds ahead"
        assert "No space left on device" in done.stderr, done.stderr

    def disturb(self, seconds: float) -> None:
        """Run and disturb for a while."""
        due, pending, sampled, told = deque(plan(self.setting, seconds, self.rng)), list[str](), 0.0, 0.0
        while (now := time.monotonic() - self.begin) < seconds:
            self.keep_running()
            while due and due[0].at <= now:
                pending.append(due.popleft().kind)
            pending = [kind for kind in dict.fromkeys(pending) if not self.strike(kind, now)]
            if self.full and now >= self.full_until:
                self.set_faults(self.clock)
            if now - sampled >= 5:
                self.sample(now)
                sampled = now
            if now - told >= 60:
                print(
                    f"{now / 60:.0f} min: round {committed(self.out)}, {self.starts} starts, {dict(self.struck)}",
                    flush=True,
                )
                told = now
            time.sleep(0.5)
        self.set_faults()

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start or resume the run."""
        words = [self.folder / "soak.toml", "--engine", self.engine, "--out", self.out, "--resume", "--quiet", *more]
        words += ["--workers", "2"] if self.engine == "pool" else []
        self.log.seek(0)
        self.log.truncate()
        self.excused = self.full
        self.starts += 1
        return subprocess.Popen(
            fedfactor_process("run", *words), stdout=self.log, stderr=subprocess.STDOUT, env=self.environment, cwd=ROOT
        )

    def keep_running(self) -> None:
        """Start the run if it does not run, and note why it ended."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return
            self.note_end(code)
            time.sleep(2)
        self.process = self.start()

    def note_end(self, code: int) -> None:
        """Record how `fedfactor run` ended; its processes must have ended, too."""
        self.log.seek(0)
        said = " ".join(self.log.read().decode(errors="replace").split())[-400:]
        kind = "killed" if code == -signal.SIGKILL else f"exit code {code}"
        self.ends[kind] += 1
        print(f"  ended: {kind}: {said}", flush=True)
        if not self.excused:
            self.wrong.append(f"ended with {kind} for no reason: {said}")
        end = time.monotonic() + 60
        while left := self.ours():
            if time.monotonic() > end:
                self.wrong.append(f"left behind after a minute: {sorted(role for _, role in left)}")
                for one, _ in left:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
            time.sleep(0.2)

    def strike(self, kind: str, now: float) -> bool:
        """Disturb the run; return False if there is nothing to disturb at the moment."""
        if kind == "clock":
            self.set_faults(self.rng.randint(-FARTHEST, FARTHEST), self.full)
            self.excused |= self.setting.loses  # Flower measures the time between signs of life by the time of day
        elif kind == "disk":
            self.set_faults(self.clock, full=True)
            self.full_until, self.excused = now + self.setting.full, True
        else:
            round = committed(self.out)
            victims = [one for one, role in self.ours() if role == kind]
            if not victims or (kind in TRAINING and round == self.hit):  # a job is given up if it loses three workers
                return False
            self.hit = round if kind in TRAINING else self.hit
            with suppress(psutil.NoSuchProcess):
                self.rng.choice(victims).kill()
            self.excused |= kind in ("server", "ServerApp", "SuperLink")
        self.struck[kind] += 1
        return True

    def ours(self) -> list[tuple[psutil.Process, str]]:
        """Return the processes of the run with their roles, whoever their parents are now."""
        mark, found = f"SOAK_FAULTS={self.faults}\0".encode(), []
        for number in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                if mark in Path(f"/proc/{number}/environ").read_bytes():
                    one = psutil.Process(number)
                    found.append((one, self.role_of(one)))
        return found

    def role_of(self, process: psutil.Process) -> str:
        """Return what a process is for."""
        words = words_of(process.pid)
        if self.process is not None and process.pid == self.process.pid:
            return "server"
        names = {Path(word).name for word in words}
        if any("forkserver" in word for word in words):
            return "forkserver" if self.process is not None and process.ppid() == self.process.pid else "worker"
        return next((role for name, role in ROLES.items() if name in names), "helper")

    def sample(self, now: float) -> None:
        """Measure all processes of the run."""
        for one, role in self.ours():
            with suppress(psutil.NoSuchProcess, OSError):
                used = (now, one.memory_full_info().uss / 1e6, one.num_fds(), one.num_threads())
                self.watched.setdefault((one.pid, one.create_time()), Watched(role)).samples.append(used)

    def finish(self) -> dict[str, Any]:
        """Stop at the next commit with Ctrl-C, then end the run with the rounds that it has; return its summary."""
        start, patience = committed(self.out), time.monotonic() + 600
        while committed(self.out) <= start:
            self.keep_running()
            assert time.monotonic() < patience, "no round within ten minutes after the last disturbance"
            time.sleep(0.5)
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(600)
        self.excused |= code == 130
        self.note_end(code)
        self.process = self.start("--set", f"train.rounds={committed(self.out)}")
        if code := self.process.wait(900):
            self.note_end(code)
        found: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return found

    def judge(self, summary: dict[str, Any]) -> None:
        """Compare with a run that nobody disturbed, and print what was found."""
        rounds = events(self.out)
        lost = {(e["round"], f["client"]): f["reason"] for e in rounds for f in e["failures"]}
        spoilt = {(e["round"], c) for e in rounds for c in e["cohort"] if damage_of(e["round"] - 1, c)}
        for round, client in sorted(spoilt - lost.keys()):
            self.wrong.append(f"round {round}: the damaged reply of client {client} was accepted")
        if not self.setting.loses:
            self.wrong += [f"round {r}: lost client {c}: {lost[r, c]}" for r, c in sorted(lost.keys() - spoilt)]
        tables = override(recipe(self.setting.clients), [f"train.rounds={len(rounds)}"])
        expected = run(resolve(tables, "soak"), engine=LeftOut(frozenset(lost))).summary
        self.wrong += [f"{key} differs from an undisturbed run" for key in HASHES if summary[key] != expected[key]]
        print(f"\n{self.engine}: {len(rounds)} rounds of {self.setting.clients} clients, {self.starts} starts")
        print(f"disturbed: {', '.join(f'{kind} {count}' for kind, count in sorted(self.struck.items()))}")
        print(f"ended: {', '.join(f'{kind} {count}' for kind, count in sorted(self.ends.items()))}")
        print(f"replies damaged: {len(spoilt)}, lost for other reasons: {len(lost.keys() - spoilt)}")
        reasons = Counter(" ".join(w for w in reason.split() if w.isalpha())[:70] for reason in lost.values())
        print(*(f"{count:>6}  {reason}" for reason, count in reasons.most_common(15)), sep="\n")
        print(*(f"{key} {summary[key]}" for key in HASHES), sep="\n")
        self.print_table()

    def print_table(self) -> None:
        """Print what the oldest process of each role used, and note what has grown."""
        print("\n| process | minutes | memory (MB) | open files | threads |\n|---|---|---|---|---|")
        oldest: dict[str, Watched] = {}
        for one in self.watched.values():
            if len(one.samples) >= 8 and one.minutes > oldest.get(one.role, one).minutes - 1e-9:
                oldest[one.role] = one
        for role, one in sorted(oldest.items()):
            cells = [
                f"{a:.{digits}f} → {b:.{digits}f}" for a, b, digits in ((*one.used(c), int(c == 1)) for c in (1, 2, 3))
            ]
            print(f"| {role} | {one.minutes:.0f} | {' | '.join(cells)} |")
            self.wrong += [f"{role}: {what} has grown within {one.minutes:.0f} minutes" for what in one.grown]


@dataclass(frozen=True)
class LeftOut(Inline):
    """All clients in this process, without some replies, by round (counted from 1) and client."""

    replies: frozenset[tuple[int, int]]

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Work the other jobs off."""
        for job in jobs:
            asked = decode(job.message)
            if asked.kind == "train" and (asked.fields["round"] + 1, job.client) in self.replies:
                yield Done(job.client, None, failure="is left out")
            else:
                yield from super().run(setup, [job])


def main() -> None:
    """Soak one engine; end with status 1 if something was wrong."""
    engine, minutes = sys.argv[1], float(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        one = Disturbed(engine, Path(folder) / engine)
        try:
            one.check_faults()
            one.disturb(60 * minutes)
            one.judge(one.finish())
        finally:
            if one.process is not None and one.process.poll() is None:
                one.process.kill()
    print(f"\n{len(one.wrong)} faults", *one.wrong[:20], sep="\n")
    sys.exit(bool(one.wrong))


if __name__ == "__main__":
    main()
