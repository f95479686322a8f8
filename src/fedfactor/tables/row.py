"""A printed figure, our own figure and the verdict on the two."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fedfactor.tables.printed import MISPRINTS

Verdict = Literal["match", "truncated", "close", "misprint", "off"]
VERDICTS: tuple[Verdict, ...] = ("match", "truncated", "close", "misprint", "off")

CLOSE = 0.005
"""Largest relative error of a `close` figure."""

_SCALES = {"K": 1e3, "M": 1e6, "G": 1e9, "MB": 1e6, "%": 1.0, "x": 1.0, "s": 1.0, "min": 1.0, "": 1.0}
_PRINTED = re.compile(r"(?P<bound>[<>]?) ?(?P<digits>(?:\d[\d,]*)?(?:\.\d+)?) ?(?P<unit>[A-Za-z%]*)")


@dataclass(frozen=True)
class Printed:
    """A figure as a paper prints it: `15.25 M`, `.5 M`, `44.9 M`, `3.8 x`, `> 93 %`.

    K, M, G and MB are decimal and become plain numbers; %, x, s and min remain as units. `> 93 %` is a statement
    ("over 93 %"), which is true or false.
    """

    digits: float
    decimals: int
    scale: float
    bound: str

    @classmethod
    def parse(cls, text: str) -> Printed:
        """Parse the figure and count its decimals."""
        found = _PRINTED.fullmatch(text)
        if found is None or not found["digits"] or found["unit"] not in _SCALES:
            raise ValueError(f"{text!r} is not a printed figure: digits and one of {', '.join(_SCALES)}")
        digits = found["digits"].replace(",", "")
        decimals = len(digits.partition(".")[2])
        return cls(float(digits), decimals, _SCALES[found["unit"]], found["bound"])

    @property
    def value(self) -> float:
        """The figure as a plain number, in the unit of `Row.ours`."""
        return self.digits * self.scale


def judge(ours: float, text: str) -> Verdict:
    """Compare our figure with a printed one.

    match: ours rounds to the printed digits (a tie may round either way), or the printed bound holds. truncated: ours
    gives the printed digits if further digits are cut off. close: within half a percent. off: none of these.
    """
    printed = Printed.parse(text)
    if printed.bound:
        holds = ours > printed.value if printed.bound == ">" else ours < printed.value
        return "match" if holds else "off"
    step = 10.0**printed.decimals
    # In units of the last printed digit. The slack is for numbers like 0.145, which binary floats cannot represent.
    difference = ours / printed.scale * step - printed.digits * step
    slack = 1e-9 * max(1.0, printed.digits * step)
    if abs(difference) <= 0.5 + slack:
        return "match"
    if 0 < difference < 1 - slack:
        return "truncated"
    return "close" if abs(ours - printed.value) <= CLOSE * abs(printed.value) * (1 + 1e-9) else "off"


@dataclass(frozen=True)
class Row:
    """One cell of a paper's table (or one figure of its text), recomputed.

    `ours` is a plain number (parameters, multiply-accumulates, bytes) or in the unit that `printed` ends with
    (%, x, s, min). `printed` is the paper's figure. Where the paper makes a statement in words ("slightly higher"),
    `printed` is the bound that we read it as, and the note says so.
    """

    paper: str
    table: str
    row: str
    quantity: str
    ours: float
    printed: str
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Key of the cell in the list of misprints."""
        return self.paper, self.table, self.row, self.quantity

    @property
    def verdict(self) -> Verdict:
        """`misprint` for the cells listed as misprints, otherwise the verdict of `judge`."""
        return "misprint" if self.key in MISPRINTS else judge(self.ours, self.printed)

    @property
    def remark(self) -> str:
        """Bound of a statement, reason of a misprint and note, joined."""
        bound = f"a statement: {self.printed}" if Printed.parse(self.printed).bound else ""
        return "; ".join(filter(None, (bound, MISPRINTS.get(self.key, ""), self.note)))

    @property
    def relative_error(self) -> float:
        """(ours - printed) / printed; 0 for a bound that holds."""
        printed = Printed.parse(self.printed)
        if printed.bound and judge(self.ours, self.printed) == "match":
            return 0.0
        return (self.ours - printed.value) / printed.value

    def as_dict(self) -> dict[str, str | float]:
        """Return the row for JSON; `printed` is a number in the unit of `ours`."""
        return {
            "paper": self.paper,
            "table": self.table,
            "row": self.row,
            "quantity": self.quantity,
            "ours": self.ours,
            "printed": Printed.parse(self.printed).value,
            "relative_error": self.relative_error,
            "verdict": self.verdict,
            "note": self.remark,
        }
