"""Made-up events of a run."""

from __future__ import annotations

from typing import Any


def round_event(number: int, score: float, seconds: float = 10.0, failed: int = 0) -> dict[str, Any]:
    return {
        "event": "round",
        "round": number,
        "cohort": [1, 2, 3, 4],
        "loss": 0.5,
        "totals": {"bytes_down": 1000 * number, "bytes_up": 1000 * number, "macs": 1, "failures": failed},
        "failures": [{"client": 1, "reason": "lost"}] * failed,
        "seconds": seconds,
        "global": {"1": {"accuracy": score}, "0.5": {"accuracy": 0.0}},
    }
