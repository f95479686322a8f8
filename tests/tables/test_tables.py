"""The papers' tables: how figures are judged, which cells are wrong in print, and that nothing else is."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from rich.console import Console

from fedfactor import tables
from fedfactor.tables import MISPRINTS, PAPERS, VERDICTS, Printed, Row, compute, judge, render


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return compute()


def cell(rows: list[Row], paper: str, table: str, row: str, quantity: str) -> Row:
    (found,) = [r for r in rows if r.key == (paper, table, row, quantity)]
    return found


# How two figures are judged, on numbers made by hand.


@pytest.mark.parametrize(
    ("ours", "printed", "verdict"),
    [
        (1_549_999, "1.55 M", "match"),
        (1_545_001, "1.55 M", "match"),
        (1_545_000, "1.55 M", "match"),  # a tie may be rounded either way
        (1_545_000, "1.54 M", "match"),
        (1_544_999, "1.55 M", "close"),
        (1_555_001, "1.55 M", "truncated"),
        (1_559_999, "1.55 M", "truncated"),
        (1_560_000, "1.55 M", "off"),
        (43_978, "43 K", "truncated"),
        (42_499, "43 K", "off"),
        (9.44, "9.5 x", "off"),
        (0.145, "0.14", "match"),
        (0.145, "0.15", "match"),
        (100.5, "100.0 %", "close"),  # half a percent is still close
        (99.5, "100.0 %", "close"),
        (100.51, "100.0 %", "off"),
        (99.49, "100.0 %", "off"),
        (37_748_736, "37 M", "truncated"),
        (500_000, ".5 M", "match"),
        (1234, "1,234", "match"),
        (1235, "1,234", "close"),
        (93.01, "> 93 %", "match"),
        (93.0, "> 93 %", "off"),
        (0.99, "< 1 x", "match"),
        (1.0, "< 1 x", "off"),
    ],
)
def test_judgement(ours: float, printed: str, verdict: str) -> None:
    assert judge(ours, printed) == verdict


@pytest.mark.parametrize(
    ("text", "value", "decimals"),
    [("15.25 M", 15_250_000, 2), (".5 M", 500_000, 1), ("91.4 MB", 91_400_000, 1), ("6.87 G", 6.87e9, 2)],
)
def test_printed_figures_are_read_with_their_unit(text: str, value: float, decimals: int) -> None:
    printed = Printed.parse(text)
    assert printed.value == pytest.approx(value)
    assert printed.decimals == decimals


@pytest.mark.parametrize("text", ["", "M", "3 furlongs", "1.2.3", "about 3"])
def test_what_is_no_figure_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a printed figure"):
        Printed.parse(text)


def test_a_row_as_json_has_both_figures_in_one_unit() -> None:
    row = Row("fedpara", "Table 5", "gamma 0.4, 100 classes", "parameters", 4_486_650, "4.50 M", "a note")
    assert json.loads(json.dumps(row.as_dict())) == {
        "paper": "fedpara",
        "table": "Table 5",
        "row": "gamma 0.4, 100 classes",
        "quantity": "parameters",
        "ours": 4_486_650,
        "printed": 4_500_000,
        "relative_error": pytest.approx(-13_350 / 4_500_000),
        "verdict": "close",
        "note": "a note",
    }


def test_a_listed_cell_is_a_misprint_and_says_why() -> None:
    key = ("fedpara", "Table 7", "10 Mbps, original", "t")
    row = Row(*key, 94.74, "94.68 s", "a note")
    assert row.verdict == "misprint"
    assert row.as_dict()["note"] == f"{MISPRINTS[key]}; a note"


# The papers.

SETTINGS = (
    "CIFAR-10 (.6, .6)",
    "CIFAR-100 (.8, .4)",
    "Tiny ImageNet (.8, .4)",
)

WRONG_IN_PRINT = {
    ("fedpara", "Table 7", "2 Mbps, original", "t_comm"),
    ("fedpara", "Table 7", "2 Mbps, original", "t"),
    ("fedpara", "Table 7", "2 Mbps, FedPara", "ratio of t"),
    ("fedpara", "Table 7", "10 Mbps, original", "t_comm"),
    ("fedpara", "Table 7", "10 Mbps, original", "t"),
    ("fedpara", "Table 8", "2 Mbps, original", "training time"),
    ("fedpara", "Table 8", "2 Mbps, FedPara", "ratio of training time"),
    ("fedpara", "Section D.1", "2 Mbps, FedPara", "ratio of training time"),
    ("fedpara", "Section 3.2", "VGG16 FedPara, CINIC-10, gamma 0.3", "parameters / original"),
    ("flanc", "Table 1", "CIFAR100 x 1.0", "p-width parameters"),
    ("flanc", "Table 1", "Shakespeare x 0.50", "p-width parameters"),
    ("flanc", "Table 1", "Shakespeare Avg", "p-width parameters"),
    ("fedhm", "Table 2", "CIFAR-10, HeteroFL 0.64", "parameters"),
    ("fedhm", "Table 3", "CIFAR-10, HeteroFL 0.64", "parameters"),
    ("fedhm", "Table 8", "CIFAR-10, slim 0.64", "parameters"),
    ("fedhm", "Table 8", "CIFAR-100, low rank 1/12", "MACs"),
    ("prism", "Table 1", "0.8", "Mem / full"),
    ("prism", "Table 1", "0.2", "Mem"),
    ("prism", "Table 10", "PriSM 0.8", "Mem / full"),
    ("prism", "Table 10", "PriSM 0.2", "Mem"),
    *(("feddecomp", "Section 3.5", setting, "tau / theta") for setting in SETTINGS),
    *(("feddecomp", "Section 3.5", setting, "(sigma + tau) / theta") for setting in SETTINGS),
}

# Cells whose rule is unknown, or which no rule explains; each row's note says what is known.
UNEXPLAINED = {
    ("fedpara", "Section 2.2", "Conv., Prop. 1 / Prop. 3", "parameters"),
    ("fedpara", "Section D.3", "FedPAQ / FedPara", "bytes per round"),
    ("fedhm", "Table 8", "CIFAR-10 non-IID, low rank 1", "MACs"),
    ("fedhm", "Table 8", "CIFAR-10 non-IID, slim 1", "parameters"),
    ("prism", "Section 4.1", "PriSM-O2, 0.2", "additional Mem"),
    ("prism", "Table 10", "FedHM 0.4", "Params / full"),
    *(("feddecomp", "Section 3.5", setting, "forward MACs / FedAvg's") for setting in SETTINGS),
}


def test_the_misprints_are_these_and_no_others(rows: list[Row]) -> None:
    assert {row.key for row in rows if row.verdict == "misprint"} == WRONG_IN_PRINT
    # A listed cell that no table has would be a typing error in the list.
    assert set(MISPRINTS) == WRONG_IN_PRINT


def test_a_misprint_really_differs_from_our_figure(rows: list[Row]) -> None:
    for row in rows:
        if row.verdict == "misprint":
            assert judge(row.ours, row.printed) in ("off", "close"), row


def test_nothing_else_is_off(rows: list[Row]) -> None:
    off = {row.key for row in rows if row.verdict == "off"}
    unknown = {
        key for key in off if key[1] == "Table 10" and key[2].startswith("FedHM") and key[3][:3] in ("MAC", "Mem")
    }
    assert off - unknown == UNEXPLAINED
    assert all(row.note for row in rows if row.verdict == "off")


def test_cells_are_unique_and_every_verdict_is_known(rows: list[Row]) -> None:
    assert not [key for key, count in Counter(row.key for row in rows).items() if count > 1]
    assert {row.verdict for row in rows} <= set(VERDICTS)


@pytest.mark.parametrize(
    ("paper", "wanted"),
    [
        ("fedpara", {"Table 1", "Table 5", "Table 7", "Table 8", "Table 10", "Table 11", "Table 12"}),
        ("fedpara", {"Section 2.2", "Section 3.2", "Section A.2", "Section D.1", "Section D.3"}),
        ("flanc", {"Table 1", "Figure 1"}),
        ("fedhm", {"Table 1", "Table 2", "Table 3", "Table 4", "Table 8", "Table 9", "Figure 8"}),
        ("fedhm", {"Section 4.4", "Section C.1"}),
        ("prism", {"Table 1", "Table 10", "Section 4.1", "Abstract"}),
        ("feddecomp", {"Section 3.5"}),
    ],
)
def test_every_table_is_there(rows: list[Row], paper: str, wanted: set[str]) -> None:
    assert wanted <= {row.table for row in rows if row.paper == paper}


def test_sizes_of_the_tables(rows: list[Row]) -> None:
    cells = Counter((row.paper, row.table) for row in rows)
    assert cells["fedpara", "Table 5"] == 2 * 10
    assert cells["flanc", "Table 1"] == 4 * 2 * 5
    assert cells["fedhm", "Table 8"] == 3 * 8 * 2 + 2
    assert cells["prism", "Table 1"] == 3 * (5 + 4)
    assert cells["prism", "Table 10"] == 2 * cells["prism", "Table 1"]


def test_fedpara_counts(rows: list[Row]) -> None:
    assert cell(rows, "fedpara", "Table 5", "original, 10 classes", "parameters").ours == 15_253_578
    # 2 R (O + I + R K^2) with O = I = 256, K = 3, R = 16, and 2 R (O + I K^2).
    assert cell(rows, "fedpara", "Table 1", "Conv., FedPara (Prop. 3)", "parameters").ours == 20_992
    assert cell(rows, "fedpara", "Table 1", "Conv., FedPara (Prop. 1)", "parameters").ours == 81_920
    assert cell(rows, "fedpara", "Table 1", "FC, FedPara", "rank of a drawn weight").ours == 256
    # 216,894 parameters in all; 63,646 of them travel at ranks (56, 16).
    sent = cell(rows, "fedpara", "Section 3.2", "original / pFedPara", "parameters sent")
    assert sent.ours == pytest.approx(216_894 / 63_646)
    # 15,253,578 parameters of 4 bytes, twice, in MiB over 2 / 8 MiB a second.
    seconds = cell(rows, "fedpara", "Table 7", "2 Mbps, original", "t_comm").ours
    assert seconds == pytest.approx(2 * 15_253_578 * 4 / 2**20 * 4)


def test_table_5_of_fedpara_is_exact_or_close(rows: list[Row]) -> None:
    inexact = {row.row for row in rows if row.table == "Table 5" and row.verdict != "match"}
    assert inexact == {
        "gamma 0.4, 10 classes",
        "gamma 0.7, 10 classes",
        "gamma 0.2, 100 classes",
        "gamma 0.3, 100 classes",
        "gamma 0.4, 100 classes",
    }


def test_flanc_counts(rows: list[Row]) -> None:
    widths = ("x 0.25", "x 0.50", "x 0.75", "x 1.0")
    for dataset, column, expected in (
        ("CIFAR10", "FLANC", (530_858, 1_219_594, 2_362_986, 3_956_810)),
        ("CIFAR10", "p-width", (701_466, 2_797_610, 6_288_442, 11_173_962)),
        ("Fashion-MNIST", "FLANC", (33_482, 63_498, 97_610, 135_818)),
        ("Shakespeare", "p-width", (49_408, 197_120, 443_136, 787_456)),
    ):
        found = [cell(rows, "flanc", "Table 1", f"{dataset} {w}", f"{column} parameters").ours for w in widths]
        assert found == list(expected)


def test_fedhm_counts(rows: list[Row]) -> None:
    for label, parameters, millions in (
        ("CIFAR-10, low rank 1", 11_173_962, 557.22),
        ("CIFAR-10, low rank 1/2", 4_157_514, 261.52),
        ("CIFAR-100, low rank 1/12", 2_707_748, 558.20),
        ("CIFAR-100, slim 0.4", 3_423_974, 187.53),
    ):
        assert cell(rows, "fedhm", "Table 8", label, "parameters").ours == parameters
        assert cell(rows, "fedhm", "Table 8", label, "MACs").ours / 1e6 == pytest.approx(millions, abs=0.005)


def test_prism_counts(rows: list[Row]) -> None:
    half = cell(rows, "prism", "Table 1", "0.6", "Params")
    assert half.ours == pytest.approx(4.465e6, rel=1e-3)
    # The same sixteen convolutions with whole ranks.
    assert "4,49" in half.note
    # r (9 M + N) parameters per layer with all outputs, r = 0.6 N; 9 M N + N N summed over the sixteen layers by hand.
    layers = [(64, 64)] * 4 + [(64, 128)] + [(128, 128)] * 3 + [(128, 256)] + [(256, 256)] * 3
    layers += [(256, 512)] + [(512, 512)] * 3
    assert f"with all outputs: {0.6 * sum(9 * m * n + n * n for m, n in layers):,.0f}" in half.note
    assert cell(rows, "prism", "Table 1", "full", "Mem").ours == 2 * 491_520 * 32
    assert cell(rows, "prism", "Table 10", "FedHM 0.8", "Params").ours == pytest.approx(9.91e6, rel=2e-3)


def test_feddecomp_sends_what_fedavg_sends(rows: list[Row]) -> None:
    assert [row.ours for row in rows if row.quantity == "upload / FedAvg's"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("paper", PAPERS)
def test_one_paper_alone(rows: list[Row], paper: str) -> None:
    assert compute(paper) == [row for row in rows if row.paper == paper]


def test_an_unknown_paper_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"fedprox.*fedpara, flanc"):
        compute("fedprox")


def test_the_rendered_tables(rows: list[Row]) -> None:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(render(rows))
    text = captured.get()
    assert "fedpara, Table 5" in text
    assert "15.2536 M" in text
    counts = Counter(row.verdict for row in rows)
    assert f"{len(rows)} figures: " + ", ".join(f"{counts[v]} {v}" for v in tables.VERDICTS) in text
