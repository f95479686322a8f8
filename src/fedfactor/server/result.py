"""The result of a finished run."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import fedfactor
from fedfactor.nn.state import weights_sha256
from fedfactor.protocol.coding import prefixed
from fedfactor.server.events import decider_of, privacy_line, start_line, summarise_rounds
from fedfactor.server.federation import Federation
from fedfactor.server.state import Server, private_sha256


@dataclass
class Result:
    """The result of a finished run: its models, history and summary."""

    federation: Federation
    server: Server

    @property
    def model(self) -> nn.Module:
        """The server's model at its largest capacity, as a plain module."""
        return self.federation.model(self.server)

    def model_at(self, capacity: float) -> nn.Module:
        """Return the server's model at a capacity, as a plain module."""
        return self.federation.model(self.server, capacity)

    def client_model(self, client: int) -> nn.Module:
        """Return a client's own model, as a plain module."""
        return self.federation.client_model(self.server, client)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The events of the run: `start`, then one per round with costs and measurements."""
        return self.federation.journal.events

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`: metrics, costs, hashes of weights and private states, versions.

        `final_NAME` and `best_NAME` are a metric after the last measured round and in the best one. `metric` is the one
        that decides which round is best.
        """
        found, decider = summarise_rounds(self.history, self.federation.rounds.target), decider_of(self.history)
        measured = next((key for key in RANKING if key in found), "")
        scores: dict[str, Any] = found.get(measured, {})
        return {
            **found,
            **self.server.totals,
            "totals": self.server.totals,
            "metric": asdict(decider),
            **{f"{when}_{decider.name}": scores.get(when) for when in ("final", "best")},
            **{
                f"{when}_{name}": x
                for when in ("final", "best")
                for name, x in scores.get(f"{when}_scores", {}).items()
            },
            f"{decider.name}_of": measured,
            "data_identified_by": self.federation.setup.task.data.identified_by,
            "seconds": sum(event.get("seconds", 0.0) for event in self.history),
            "weights_sha256": weights_sha256(self.server.tensors | prefixed("moved", self.server.moves.total)),
            "private_sha256": private_sha256(self.federation.store),
            "measured": {key: found[key] for key in MEASURED if key in found},
            **self._privacy(),
            "versions": {
                "fedfactor": fedfactor.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
            },
        }

    def _privacy(self) -> dict[str, Any]:
        """Return the settings of differential privacy, and what the last round says about it."""
        settings, last = self.federation.setup.privacy, self.history[-1]
        if settings is None:
            return {}
        spent = last.get("privacy", {}) if last["event"] == "round" else {"epsilon": 0.0}
        now = {"budget": settings.budget} if settings.budget else {}
        return {"privacy": {**self.history[0]["privacy"], **now, **spent}}

    def __str__(self) -> str:
        """Return measurements, their protocol and costs as a few lines of text."""
        found, protocol, name = self.summary, self.history[0]["protocol"], decider_of(self.history).name
        lines = [f"{self.federation.setup.method} after {found['rounds']} rounds"]
        lines += [words] if (words := start_line(self.history[0])) else []
        last: dict[str, Any] = next((event for event in reversed(self.history) if set(MEASURED) & set(event)), {})
        for key, meaning in MEASURED.items():
            if key in found:
                score = found[key]
                best = f"best {score['best']:.4f} in round {score['best_round']}"
                lines.append(f"{key}: {name} {score['final']:.4f} ({best}); {protocol[meaning]}")
                lines += [f"  {line}" for line in _details(last.get(key, {}))]
        macs = "not counted" if found["macs"] is None else f"{found['macs']:,}"
        lines.append(f"bytes up {found['bytes_up']:,}, bytes down {found['bytes_down']:,}; MACs {macs}")
        if "simulated_seconds" in found:
            energy = f", {found['simulated_joules']:.6g} J" if "simulated_joules" in found else ""
            lines.append(f"on the fleet {found['simulated_seconds']:.6g} s{energy}")
        lines += [privacy_line(found["privacy"])] if "privacy" in found else []
        lines.append(f"failures {found['failures']:,}")
        return "\n".join(lines)


RANKING = ("all", "global", "selected_after")
"""Measurements by which methods are ranked: the first one that all of them have."""

MEASURED = {"global": "global", "all": "clients", "selected_before": "clients", "selected_after": "clients"}
"""The key of the protocol that describes each measurement."""


def _details(scores: dict[str, Any]) -> list[str]:
    """Return the details of a measurement: one line per capacity, or one line with the spread over clients."""
    if "each" in scores:
        names = [key for key in scores if key not in ("at", "clients", "each", "who")]
        words = [f"{key} {scores[key]:.4f}" for key in names[1:]]  # the first one is in the line above
        return [f"{', '.join(words)} over {scores['clients']} clients"]
    return [
        f"at capacity {level}: " + ", ".join(f"{key} {value:.4f}" for key, value in score.items() if key != "examples")
        for level, score in scores.items()
    ]
