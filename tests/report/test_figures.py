"""The figures as files: vector graphics with names, axes and a legend, each readable in print."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedfactor.report import read_groups, report
from fedfactor.report.elements import Section
from fedfactor.report.figures import write_figures
from fedfactor.report.sections import sections
from tests.helpers.command import fedfactor
from tests.helpers.made_runs import make_run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Section]:
    """The sections of two methods; the report of the one has all kinds of figures."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        make_run(folder / f"fedavg-{seed}", "fedavg", seed, rounds=6, options={"note": "<$x$ & y>"}, clock=True)
        make_run(folder / f"flanc-{seed}", "flanc", seed, rounds=6, factor=0.3, levels=("1", "0.5"))
    return sections(*read_groups([folder]))


def only(found: list[Section], *names: str) -> list[Section]:
    """Keep some sections."""
    return [section for section in found if section.name in names]


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_lines_have_a_legend_axes_and_legible_text(found: list[Section], tmp_path: Path) -> None:
    written = write_figures(only(found, "scores"), tmp_path, "svg")
    assert {path.name for path in written} == {path.name for path in tmp_path.iterdir()}
    assert {"accuracy-by-round-all.svg", "accuracy-by-bytes-global.svg"} <= {path.name for path in written}
    path = tmp_path / "accuracy-by-round-all.svg"
    assert {"fedavg", "flanc", "round", "accuracy in per cent"} <= set(texts(path))
    text = path.read_text()
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", text)]
    (width,) = re.findall(r'<svg [^>]*?width="([\d.]+)pt"', text)
    assert min(sizes) >= 8 and float(width) == pytest.approx(252)  # points: 3.5 inches
    assert "Accuracy against rounds" in text and "<image" not in text


@pytest.mark.parametrize(
    ("section", "name", "words"),
    [
        ("cost", "time-to-target", {"fedavg", "flanc", "2 Mbps", "50 Mbps"}),
        ("capacity", "accuracy-by-capacity", {"fedavg", "flanc", "capacity"}),
        ("data", "examples-by-class-0", {"client", "class", "10 examples", "9"}),
        ("fleet", "timeline-0-fedavg", {"offline", "upload", "end of the round", "client 1, pc", "minutes"}),
        ("bases", "gram-1-flanc-conv1", {"basis vector", "inner product"}),
    ],
)
def test_every_kind_of_figure_is_a_vector_graphic(
    found: list[Section], tmp_path: Path, section: str, name: str, words: set[str]
) -> None:
    write_figures(only(found, section), tmp_path, "svg")
    path = tmp_path / f"{name}.svg"
    assert words <= set(texts(path)) and "<image" not in path.read_text()


def test_names_are_drawn_as_they_are(found: list[Section], tmp_path: Path) -> None:
    (section,) = only(found, "capacity")
    (figure, *_) = section.elements
    figure.plot.data[-1].name = "&lt;$x$ &amp; y_1&gt;"  # type: ignore[attr-defined]
    write_figures([replace(section, elements=[figure])], tmp_path, "svg")
    assert "&lt;$x$ &amp; y_1&gt;" in (tmp_path / "accuracy-by-capacity.svg").read_text()


def test_a_pdf_embeds_its_fonts_and_is_the_same_each_time(found: list[Section], tmp_path: Path) -> None:
    (one,) = write_figures(only(found, "data"), tmp_path / "a", "pdf")
    (two,) = write_figures(only(found, "data"), tmp_path / "b", "pdf")
    data = one.read_bytes()
    assert data.startswith(b"%PDF") and b"/FontFile2" in data and b"/Type3" not in data
    assert data == two.read_bytes()


def test_the_command_writes_one_file_per_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "a", rounds=2, each=False)
    calls: list[Any] = []
    monkeypatch.setattr("fedfactor.report.figures.write_figures", lambda *given: calls.append(given))
    words = ("report", tmp_path / "a", "-o", tmp_path / "r.html", "--figures", tmp_path / "figures")
    done = fedfactor(*words, "--figure-format", "svg")
    assert done.exit_code == 0 and f"figures: {tmp_path / 'figures'}" in done.stdout, done.stderr
    assert calls[0][1:] == (tmp_path / "figures", "svg")
    wrong = fedfactor(*words, "--figure-format", "png")
    assert wrong.exit_code == 2 and "figure_format" in wrong.stderr and "svg" in wrong.stderr
    report([tmp_path / "a"], tmp_path / "r.html")
    assert len(calls) == 1  # only where they are asked for


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedfactor.report.figures", None)  # its import fails
    with pytest.raises(ImportError, match=r"figures need matplotlib .* pip install .*\[figures\]'"):
        report([], "r.html", figures="figures")
