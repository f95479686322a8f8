"""Draw accuracy against megabytes with one line per run: `python docs/picture.py docs/demo.svg runs/demo/*`.

It reads run directories only. The description in the SVG file has the last figures of each line.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 28, 48
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by the colour-blind
STYLE = """text { font: 14px system-ui, sans-serif; fill: #222 } .grid { stroke: #ddd }
.line { fill: none; stroke-width: 2.5 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #444 } }"""

Curve = list[tuple[float, float]]
"""Megabytes and accuracy, one pair per measurement."""


def curve(directory: Path) -> Curve:
    """Return the accuracy of the server's full model, and the megabytes until then, from a run directory."""
    found = []
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "round" and "global" in event:
            moved = event["totals"]["bytes_up"] + event["totals"]["bytes_down"]
            largest = max(event["global"], key=float)
            found.append((moved / 1e6, event["global"][largest]["accuracy"]))
    if not found:
        raise SystemExit(f"{directory} has no round in which the server's model was measured")
    return found


def nice(most: float) -> float:
    """Return a round step that divides a range into three to seven parts."""
    for step in (base * 10.0**power for power in range(-2, 7) for base in (1, 2, 5)):
        if most / step <= 7:
            return step
    return most


def draw(curves: dict[str, Curve]) -> str:
    """Draw the curves as SVG."""
    step = nice(max(x for points in curves.values() for x, _ in points))
    ticks = int(-(-max(x for points in curves.values() for x, _ in points) // step))
    most = step * ticks

    def at(x: float, y: float) -> tuple[float, float]:
        across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return round(LEFT + across * x / most, 1), round(TOP + down * (1 - y), 1)

    said = "; ".join(f"{name}: {points[-1][1]:.3f} after {points[-1][0]:.1f} MB" for name, points in curves.items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        f'<title id="t">Accuracy against megabytes moved</title><desc id="d">{escape(said)}</desc>',
        f"<style>{STYLE}</style>",
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        (x, y), (end, _) = at(0, share), at(most, share)
        parts.append(
            f'<path class="grid" d="M{x} {y}H{end}"/><text x="{x - 8}" y="{y + 5}" text-anchor="end">{share:g}</text>'
        )
    for number in range(ticks + 1):
        x, y = at(number * step, 0)
        parts.append(f'<text x="{x}" y="{y + 20}" text-anchor="middle">{number * step:g}</text>')
    parts.append(f'<text x="{LEFT}" y="16">accuracy of the server\'s model</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">megabytes up and down</text>')
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        path = "L".join(f"{x} {y}" for x, y in (at(*point) for point in points))
        x, y = at(*points[-1])
        place = f'x="{x - 6}" y="{y + 22}" text-anchor="end"' if x > WIDTH / 2 else f'x="{x + 8}" y="{y + 5}"'
        parts.append(f'<path class="line" stroke="{colour}" d="M{path}"/>')
        parts += [f'<circle cx="{a}" cy="{b}" r="3.5" fill="{colour}"/>' for a, b in (at(*point) for point in points)]
        parts.append(f'<text {place} style="fill: {colour}; font-weight: bold">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw the run directories given."""
    target, *directories = map(Path, sys.argv[1:])
    target.write_text(draw({directory.name: curve(directory) for directory in directories}))


if __name__ == "__main__":
    main()
