"""The page in a real browser, without a window: `make test-browser`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfactor.report import report
from tests.helpers.chromium import Chromium
from tests.helpers.made_runs import comparison, timed_comparison

pytestmark = pytest.mark.browser

IN_VIEW = """new Promise((done) => {
  const near = (box) => box.top < innerHeight && box.bottom > 0;
  const look = () => {
    const unfolded = [...document.querySelectorAll(".plot")].filter((plot) => plot.checkVisibility());
    const plots = unfolded.filter((plot) => near(plot.getBoundingClientRect()));
    if (plots.every((plot) => plot.hasAttribute("data-drawn"))) done(performance.now());
    else setTimeout(look, 5);
  };
  look();
})"""

ALL = """(async () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  for (const plot of document.querySelectorAll(".plot")) {
    plot.scrollIntoView();
    while (!plot.hasAttribute("data-drawn")) await new Promise((next) => setTimeout(next, 5));
  }
  return document.querySelectorAll(".plot .main-svg").length;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    found = Chromium()
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    report([comparison(folder / "runs", rounds=30)], folder / "report.html", title="Five methods, four seeds")
    return folder / "report.html"


SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_all_figures_are_drawn_without_a_complaint(browser: Chromium, page: Path, size: str, dark: bool) -> None:
    width, height = SIZES[size]
    browser.open(page, width=width, height=height, dark=dark)
    plots = browser.run("document.querySelectorAll('.plot').length")
    assert plots > 20
    assert browser.run(ALL) >= plots
    assert browser.run(
        "[...document.querySelectorAll('figure .plot')].every(p => p.closest('figure').querySelector('table tbody tr'))"
    )
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
    back = browser.run("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    text = browser.run("getComputedStyle(document.querySelector('.plot .xtick text')).fill")
    assert text == ("rgb(230, 233, 239)" if dark else "rgb(27, 33, 48)")
    assert browser.complaints() == []
    assert [url for url in browser.requested() if not url.startswith(("file:", "data:", "blob:"))] == []
    shots = os.environ.get("FEDFACTOR_SHOTS")
    if shots:
        for place in ("overview", "scores", "cost", "clients", "data", "ranks", "bases", "recipes"):
            browser.run(f"document.querySelector('#{place}').scrollIntoView({{behavior: 'instant'}})")
            browser.run("new Promise((next) => setTimeout(next, 300))")
            browser.screenshot(Path(shots) / f"{size}-{'dark' if dark else 'light'}-{place}.png")


CUT = """[...document.querySelectorAll(".scroll, figure, .plot .main-svg")]
  .filter((box) => box.checkVisibility())
  .filter((box) => box.scrollWidth > box.clientWidth || box.getBoundingClientRect().right > innerWidth)
  .map((box) => box.getAttribute("aria-label") ?? box.closest("figure").id)"""
LEGENDS = """[...document.querySelectorAll(".plot[data-drawn]")]
  .map((plot) => [plot.closest("figure").id, [...plot.querySelectorAll(".legendtext")].map((one) => one.textContent)])"""


def test_no_table_is_cut_on_a_screen_of_1280_pixels(browser: Chromium, page: Path) -> None:
    browser.open(page, width=1280, height=900)
    assert browser.run(CUT) == []
    browser.run("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert browser.run(CUT) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_printed_figures_have_their_legend_and_nothing_is_cut(browser: Chromium, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.call("Emulation.setDeviceMetricsOverride", width=703, height=1000, deviceScaleFactor=1, mobile=False)
    assert browser.run(CUT) == []  # A4 without its margins
    heights = "[...document.querySelectorAll('.scroll')].every((box) => box.scrollHeight <= box.clientHeight)"
    assert browser.run(heights)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('.plot .xtick text')).fill") == "rgb(27, 33, 48)"
    legends = dict(browser.run(LEGENDS))
    assert legends["accuracy-by-round-all"] == ["fedavg", "feddecomp", "flanc", "local", "prism"]
    assert legends["time-to-target"] == legends["accuracy-by-round-all"]
    assert legends["examples-by-class-0"] == []
    browser.call("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert dict(browser.run(LEGENDS))["accuracy-by-round-all"] == []
    assert browser.complaints() == []


def test_a_downloaded_figure_is_an_svg_with_its_legend(browser: Chromium, page: Path) -> None:
    browser.open(page, dark=True)
    browser.run("document.querySelector('.plot').scrollIntoView({behavior: 'instant'})")
    browser.run(IN_VIEW)
    drawn = browser.run("""(async () => {
      let asked;
      Plotly.downloadImage = (...given) => { asked = given; };
      document.querySelector(".plot .modebar-btn").click();
      return [asked[1].filename, decodeURIComponent(await Plotly.toImage(...asked))];
    })()""")
    assert drawn[0] == "accuracy-by-round-all" and drawn[1].startswith("data:image/svg+xml")
    assert all(f">{name}</text>" in drawn[1] for name in ("fedavg", "prism", "round"))
    assert "rgb(27, 33, 48)" in drawn[1] and "rgb(230, 233, 239)" not in drawn[1]  # dark text on white
    assert browser.complaints() == []


@pytest.mark.parametrize("size", SIZES)
def test_the_timeline_of_a_round_is_drawn_to_scale(browser: Chromium, tmp_path: Path, size: str) -> None:
    """One bar per client, in whose order and colours one phase follows the other; the late client passes the end."""
    report([timed_comparison(tmp_path / "runs")], tmp_path / "report.html")
    browser.open(tmp_path / "report.html", width=SIZES[size][0], height=SIZES[size][1])
    browser.run(ALL)
    boxes = browser.run("""(() => {
      const plot = document.querySelector("#timeline-0-fedavg .plot");
      const seen = [...plot.querySelectorAll(".scatterlayer .trace")].map((trace) => {
        const paths = [...trace.querySelectorAll("path.js-line")];
        return { colour: paths[0].style.stroke, width: parseFloat(paths[0].style.strokeWidth),
          d: paths.map((path) => path.getAttribute("d")).join(" ") };
      });
      return { seen, names: [...plot.querySelectorAll(".legendtext")].map((one) => one.textContent),
        rows: [...plot.querySelectorAll(".ytick text")].map((one) => one.textContent) };
    })()""")
    assert boxes["names"] == ["offline", "download", "compute", "upload", "end of the round"]
    assert boxes["rows"] == [
        "client 4, phone <old>, late",
        "client 0, phone <old>",
        "client 3, pc",
        "client 2, pc",
        "client 1, pc",
    ]
    *phases, end = boxes["seen"]
    assert len({one["colour"] for one in phases}) == 4 and all(one["width"] >= 2 for one in phases)
    bars = [re.findall(r"M([\d.]+),([\d.]+)[LH]([\d.]+)", one["d"]) for one in phases]
    assert [len(found) for found in bars] == [1, 5, 5, 5]
    spans = {}
    for phase, found in zip(("offline", "download", "compute", "upload"), bars, strict=True):
        for left, height, right in found:
            spans.setdefault(height, {})[phase] = float(left), float(right)
    late, first = (spans[height] for height in sorted(spans, key=float, reverse=True)[:2])
    scale = (late["upload"][1] - late["upload"][0]) / 200
    assert late["download"][1] - late["download"][0] == pytest.approx(20 * scale, abs=1)
    assert first["offline"][1] == pytest.approx(first["download"][0], abs=0.5) and late["download"][1] == pytest.approx(
        late["compute"][0], abs=0.5
    )
    edge = float(re.match(r"M([\d.]+)", end["d"])[1])
    assert first["upload"][1] <= edge + 0.5 < late["upload"][1]
    assert edge - late["download"][0] == pytest.approx(60 * scale, abs=1)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
    assert size == "phone" or browser.run(CUT) == []
    drawn = browser.run("[...document.querySelectorAll('#fleet .plot')].map((plot) => plot.closest('figure').id)")
    assert drawn[:2] == ["accuracy-by-simulated-time-all", "accuracy-by-energy-all"]
    assert browser.complaints() == []


def test_colours_follow_the_reader_while_the_page_is_open(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.run(IN_VIEW)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.run("new Promise((next) => setTimeout(next, 300))")
    drawn = "document.querySelector('.plot[data-drawn] .xtick text')"
    browser.run("document.querySelector('.plot').scrollIntoView({behavior: 'instant'})")
    browser.run(IN_VIEW)
    assert browser.run(f"getComputedStyle({drawn}).fill") == "rgb(230, 233, 239)"


def test_by_keyboard_a_run_is_hidden_in_all_figures_and_a_table_opened(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.plot').scrollIntoView({behavior: 'instant'})")
    browser.run(IN_VIEW)
    browser.press("Tab", 9)
    browser.run("document.querySelector('fieldset input').focus()")
    browser.press(" ", 32, " ")
    shown = "[...document.querySelector('.plot').data].filter(trace => trace.meta === 0).map(trace => trace.visible)"
    assert browser.run(shown) == [False, False]  # the line and its band
    browser.press(" ", 32, " ")
    browser.run("document.querySelector('fieldset input[value=bands]').focus()")
    browser.press(" ", 32, " ")
    assert browser.run(shown) == [False, True]  # the line without its band
    browser.run("document.querySelector('figure details summary').focus()")
    browser.press("Enter", 13, "\r")
    assert browser.run("document.querySelector('figure details').open")
    assert browser.complaints() == []


def test_a_screen_reader_finds_names_for_everything(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.plot').scrollIntoView({behavior: 'instant'})")
    browser.run(IN_VIEW)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
    ]
    wanted = {"checkbox", "heading", "image", "img", "region", "table", "link", "navigation", "group"}
    unnamed = [role for role, name in named if role in wanted - {"group"} and not name.strip()]
    assert unnamed == []
    images = [name for role, name in named if role in ("image", "img")]
    inner = "[...document.querySelectorAll('.plot *')].filter(one => one.tabIndex >= 0).length"
    assert browser.run(inner) == 0  # what is hidden from a screen reader must not be reached by keyboard
    assert any(name.startswith("Accuracy against rounds. All clients") for name in images)
    assert browser.run("document.documentElement.lang") == "en"


def test_twenty_runs_of_500_rounds_open_in_two_seconds(browser: Chromium, tmp_path: Path) -> None:
    report([comparison(tmp_path / "runs", rounds=500)], tmp_path / "report.html")
    walls, works = [], []
    for _ in range(5):
        before = browser.cpu_seconds()
        browser.open(tmp_path / "report.html")
        browser.run("document.querySelector('#scores').scrollIntoView({behavior: 'instant'})")
        walls.append(browser.run(IN_VIEW) / 1000)
        works.append(browser.cpu_seconds() - before)
    size = (tmp_path / "report.html").stat().st_size / 1e6
    print(
        f"20 runs of 500 rounds: {size:.1f} MB; with the figures in view after {min(walls):.2f} to {max(walls):.2f} s, "
        f"{min(works):.2f} to {max(works):.2f} s of processor time"
    )
    # On a busy machine the time on the wall is that of others; this is what it would be on one idle core.
    assert min(*walls, *works) < 2
