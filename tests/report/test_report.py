"""What stands on the page: figures worked out by hand from made-up runs, and real runs of methods that note things."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from plotly.offline import get_plotlyjs
from torch import nn

from fedfactor.audit.result import AttackResult, AuditResult, png
from fedfactor.factor import effective_rank
from fedfactor.report import read_groups, report
from fedfactor.report.elements import Element, Figure, Section, Table
from fedfactor.report.groups import Group, Mean
from fedfactor.report.insides import kept_ranks
from fedfactor.report.plots import COLOURS, Curve, bars, colour, dash, scale_of, traces
from fedfactor.report.read import read_run
from fedfactor.report.sections import plotly_script, sections
from fedfactor.report.values import UNITS, amount, span, thin, unit_for
from fedfactor.runs.execute import run
from fedfactor.runs.open import load
from fedfactor.runs.recipe import resolve
from fedfactor.runs.simulate import simulate
from fedfactor.task import ACCURACY
from tests.helpers.command import fedfactor
from tests.helpers.made_runs import comparison, make_run, timed_comparison


def elements(found: list[Section]) -> list[Element]:
    def inner(element: Any) -> list[Element]:
        nested = getattr(element, "elements", [])
        return [element, *(one for part in nested for one in inner(part))]

    return [one for section in found for part in section.elements for one in inner(part)]


def figures(found: list[Section]) -> dict[str, Figure]:
    return {element.name: element for element in elements(found) if isinstance(element, Figure)}


def tables(found: list[Section]) -> dict[str, Table]:
    every = [element for element in elements(found) if isinstance(element, Table)]
    return {table.caption: table for table in every}


def of(paths: list[Path], **how: Any) -> list[Section]:
    return sections(*read_groups(paths), **how)


def rows(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.head, row, strict=True)) for row in table.rows]


def test_a_comparison_has_every_part(tmp_path: Path) -> None:
    found = of([comparison(tmp_path / "runs", seeds=2)])
    assert [section.name for section in found] == [
        "overview", "scores", "cost", "capacity", "clients", "data", "ranks", "bases", "picks", "noted", "failures",
        "protocol", "recipes",
    ]  # fmt: skip
    names = set(figures(found))
    assert {
        "accuracy-by-round-all",
        "accuracy-by-bytes-all",
        "accuracy-by-round-global",
        "bytes-to-target",
        "time-to-target",
        "accuracy-by-capacity",
        "accuracy-by-capacity-2-flanc",
    } <= names
    assert {"clients-sorted", "clients-against-local", "clients-against-fedavg", "examples-by-class-0"} <= names
    assert {"rank-4-prism", "recorded-tau_change", "recorded-sigma_distance", "picks-4-prism-layer3"} <= names
    assert {"gram-2-flanc-conv1", "gram-2-flanc-conv2", "usage-2-flanc-conv1"} <= names


def test_every_figure_shows_something_and_has_a_table(tmp_path: Path) -> None:
    for figure in figures(of([comparison(tmp_path / "runs", seeds=2)])).values():
        assert figure.plot.data and figure.table.rows, figure.name
        assert all(len(row) == len(figure.table.head) for row in figure.table.rows), figure.name


def test_overview_by_hand(tmp_path: Path) -> None:
    for seed, top in ((0, 0.5), (1, 0.7)):
        folder = make_run(tmp_path / f"{seed}", "fedpara", seed, rounds=1, factor=0.25, each=False)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        event = json.loads(lines[1]) | {"global": {"1": {"accuracy": top}}}
        (folder / "metrics.jsonl").write_text(f"{lines[0]}\n{json.dumps(event)}\n")
    (row,) = rows(next(iter(tables(of([tmp_path])).values())))
    assert row["run"] == "fedpara" and row["seeds"] == "2" and row["rounds"] == "1"
    # t of one degree of freedom is 12.706, the deviation of 0.5 and 0.7 is 0.1414, over the root of two: 127.06 %
    assert row["last accuracy"] == "60.00 ± 127.06 %"
    assert row["moved"] == "5 MB" and row["dense FedAvg moves"] == "4.00x" and row["MACs"] == "1 G"


def test_operations_that_were_not_counted_stay_empty(tmp_path: Path) -> None:
    journal = make_run(tmp_path / "a", rounds=2) / "metrics.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    for event in events[1:]:
        event["macs"] = event["totals"]["macs"] = None
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    found = tables(of([tmp_path / "a"]))
    (row,) = rows(next(iter(found.values())))
    assert row["MACs"] == "-" and row["moved"] == "40 MB"
    assert not any("MACs" in table.head for caption, table in found.items() if caption.startswith("Cost of reaching"))


def test_cost_of_a_target_by_hand(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=8, sections={"evaluate": {"target": 0.6}})
    scores = dict(read_run(folder, "a").scores["all"])
    first = min(t for t, score in scores.items() if score >= 0.6)
    found = tables(of([folder], joules_per_byte=1e-6))
    (row,) = rows(found["Cost of reaching 60.00 %"])
    assert row["reached by"] == "1 of 1" and row["rounds"] == str(first)
    assert row["bytes"] == f"{20 * first} MB"  # five clients, 4 MB each, down and up together
    assert row["MACs"] == f"{first} G" and row["energy"] == f"{20 * first} J"
    assert row["time at 2 Mbps"] == span(9.0 * first) and row["time at 50 Mbps"] == span(1.3 * first)
    (row,) = rows(next(table for caption, table in found.items() if caption.startswith("One round")))
    assert (row["bytes"], row["MACs"], row["time at 2 Mbps"], row["energy"]) == ("20 MB", "1 G", "9 s", "20 J")
    (row,) = rows(tables(of([folder], target=0.99))["Cost of reaching 99.00 %"])
    assert row["reached by"] == "0 of 1" and row["bytes"] == "not reached" and "energy" not in row


def test_time_on_a_fleet_by_hand(tmp_path: Path) -> None:
    found = of([timed_comparison(tmp_path / "runs")], target=0.6)
    assert [section.name for section in found][:4] == ["overview", "scores", "cost", "fleet"]
    names = figures(found)
    assert {"accuracy-by-simulated-time-all", "accuracy-by-energy-all", "simulated-time-to-target"} <= names.keys()
    scores = [dict(read_run(tmp_path / f"runs/fedavg-{seed}", "").scores["all"]) for seed in (0, 1)]
    rounds = [min(t for t, score in one.items() if score >= 0.6) for one in scores]
    seconds = [rounds[0] * 60.0, rounds[1] * 61.0]
    half = 12.706 * abs(seconds[1] - seconds[0]) / 2
    row = rows(tables(found)["Cost of reaching 60.00 %"])[0]
    assert row["simulated time"] == Mean(sum(seconds) / 2, half, 2).text(span)
    assert row["energy"].startswith(f"{100 * sum(rounds) / 2:.3g} J")
    by_device = rows(next(table for caption, table in tables(found).items() if caption.startswith("Clients by device")))
    phone = next(row for row in by_device if row["device"] == "phone <old>" and row["run"] == "fedavg")
    assert (phone["clients asked"], phone["used"], phone["late"], phone["compute"]) == ("40", "50.0 %", "50.0 %", "7 s")
    overview = rows(next(iter(tables(found).values())))
    assert overview[1]["time on the fleet"] == Mean(125.0, 12.706 * 5, 2).text(span)
    timeline = names["timeline-1-fedpara"]
    assert [row["client"] for row in rows(timeline.table)] == [
        "client 1, pc", "client 2, pc", "client 3, pc", "client 0, phone <old>", "client 4, phone <old>, late",
    ]  # fmt: skip
    assert rows(timeline.table)[3]["offline (s)"] == "10"


def test_without_a_target_it_is_what_every_run_reaches(tmp_path: Path) -> None:
    for name, top in {"fedavg": 0.8, "fedpara": 0.6}.items():
        make_run(tmp_path / name, name, top=top)
    best = max(score for _, score in read_run(tmp_path / "fedpara", "").scores["all"])
    table = tables(of([tmp_path]))[f"Cost of reaching {100 * best:.2f} %"]
    assert [row["reached by"] for row in rows(table)] == ["1 of 1", "1 of 1"]


def test_a_metric_whose_lower_values_are_better(tmp_path: Path) -> None:
    for method, top in (("fedavg", 0.5), ("local", 0.25), ("fedpara", 0.75)):
        make_run(tmp_path / method, method, top=top, metric="mae", clock=True)
    make_run(tmp_path / "other", "fedavg")
    groups, remarks = read_groups([tmp_path])
    assert len(groups) == 3 and "other is left out: it is measured by accuracy (higher is better)" in remarks[0]
    found = sections(groups, remarks)
    best = {group.method: min(value for _, value in group.runs[0].scores["all"]) for group in groups}
    overview = next(one for one in elements(found) if isinstance(one, Table) and "best mae" in one.head)
    assert [row[overview.head.index("best mae")] for row in overview.rows] == [f"{best[g.method]:.4g}" for g in groups]
    said = " ".join(getattr(one, "words", "") for one in elements(found))
    assert f"mae {best['local']:.4g}, the lowest mae that every run reaches" in said and "accuracy of" not in said
    won = next(one for one in elements(found) if isinstance(one, Table) and "mean gain" in one.head)
    row = next(row for row in won.rows if row[0].startswith("fedpara"))
    assert row[won.head.index("win")] == "20" and row[won.head.index("mean gain")].startswith("+0.")
    names = [one.name for one in elements(found) if isinstance(one, Figure)]
    assert {"mae-by-round-all", "mae-by-bytes-all", "clients-sorted"} <= {*names}
    timed = figures(found)["mae-by-simulated-time-all"]
    assert timed.title == "Mae against simulated minutes" and timed.plot.layout.yaxis.title.text == "mae"
    assert rows(timed.table)[0]["mae"] == f"{groups[0].runs[0].scores['all'][0][1]:.4g}"
    clients = groups[0].runs[0].clients["all"][1]
    (drawn, *_) = next(
        one for one in elements(found) if isinstance(one, Figure) and one.name == "clients-sorted"
    ).plot.data
    assert drawn.y[0] == pytest.approx(max(clients.values()), rel=1e-5)  # worst first
    report([tmp_path / "local"], tmp_path / "r.html", target=99.9)
    assert "per cent" not in " ".join(names)
    with pytest.raises(ValueError, match=r"target must be in \[0, 1\] as accuracy is"):
        report([tmp_path / "other"], tmp_path / "r.html", target=99.9)


def test_clients_against_a_reference_are_compared_seed_by_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "l", "local", seed=1, top=0.5, each=True)
    make_run(tmp_path / "f0", "fedavg", seed=0, top=0.9)
    make_run(tmp_path / "f1", "fedavg", seed=1, top=0.9)
    (row,) = rows(tables(of([tmp_path]))["How many clients win and lose against Local"])
    assert (row["seed"], row["clients"], row["win"], row["tie"], row["lose"]) == ("1", "20", "20", "0", "0")
    assert load_gain(tmp_path / "f1", tmp_path / "l") == row["mean gain"]


def load_gain(mine: Path, theirs: Path) -> str:
    from fedfactor.server.events import client_gains

    events = [[json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()] for one in (mine, theirs)]
    return f"{100 * client_gains(events[0], events[1])['mean_gain']:+.2f}"


def test_bands_are_means_with_their_interval() -> None:
    def drawn(*points: tuple[float, Mean]) -> Any:
        return traces(Curve.of(Group(0, "g"), points), scale_of(ACCURACY))

    band, line = drawn((1, Mean(0.5, 0.1, 2)), (2, Mean(0.6, 0.2, 2)))
    assert band.x == (1, 2, 2, 1) and band.y == pytest.approx([60, 80, 40, 40]) and line.y == (50, 60)
    assert len(drawn((1, Mean(0.5, None, 1)))) == 1
    band, _ = drawn((1, Mean(0.5, 2.0, 2)))
    assert band.y == (100, 0)


def test_whiskers_end_at_nothing() -> None:
    bar = bars(Group(0, "g"), ["x", "y", "z"], [Mean(2.0, 3.0, 2), Mean(5.0, None, 1), None], 0.5)
    assert bar.y == (1.0, 2.5, None)
    assert bar.error_y.array == (1.5, None, None) and bar.error_y.arrayminus == (1.0, None, None)


def test_units_suit_the_largest_value(tmp_path: Path) -> None:
    sizes, times = UNITS["bytes"], UNITS["time"]
    assert unit_for([3e6, 2e9], sizes)[1] == "GB" and unit_for([3e6, 2e3], sizes)[1] == "MB"
    assert unit_for([59.0], times)[1] == "seconds" and unit_for([7200.0], times)[1] == "hours"
    assert unit_for([], sizes)[1] == "B"
    found = figures(of([make_run(tmp_path / "a", rounds=3)]))  # 20 MB a round
    assert found["accuracy-by-bytes-all"].title == "Accuracy against megabytes"
    assert (
        found["accuracy-by-bytes-all"].plot.data[-1].x == (20, 40, 60)
        and found["accuracy-by-bytes-all"].table.head[2] == "MB"
    )
    assert found["time-to-target"].title == "Seconds to the target"


def test_what_figures_mean_stands_there_once(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", "fedavg", seed)
    other = make_run(tmp_path / "b", "fedpara")
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace("none: this run is made up", "central"))
    table = tables(of([tmp_path]))["What the figures mean"]
    assert [row for row in table.rows if row[0] == "global"] == [
        ["global", "none: this run is made up", "fedavg"],
        ["global", "central", "fedpara"],
    ]
    assert [row for row in table.rows if row[0] == "every"] == [["every", "1", "all"]]


def test_words_of_runs_cannot_become_markup(tmp_path: Path) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    folder = make_run(
        tmp_path / "a", "<i>method</i>", failing=evil, sections={"x": {"y": evil}, "codec": {"name": "<b>"}}
    )
    task = json.loads((folder / "task.json").read_text()) | {"class_names": [evil] * 10}
    (folder / "task.json").write_text(json.dumps(task))
    out = tmp_path / "report.html"
    report([folder], out, title=evil)
    reader = Tags()
    reader.feed(out.read_text())
    assert not {"img", "i", "b"} & set(reader.tags) and reader.tags.count("script") == reader.closed.count("script")
    assert out.read_text().count(evil) == 0 and "&lt;/script&gt;&lt;img src=x" in out.read_text()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.closed: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for key, value in attrs if key == "id"]
        self.links += [value or "" for key, value in attrs if key in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        self.closed.append(tag)


def test_the_page_needs_no_other_file_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.html"
    report([comparison(tmp_path / "runs", seeds=1)], out)
    reader = Tags()
    reader.feed(out.read_text())
    assert len(set(reader.ids)) == len(reader.ids)
    inside = [link.removeprefix("#") for link in reader.links if link.startswith("#")]
    assert set(inside) <= set(reader.ids) and {link[0] for link in reader.links} <= {"#", "d"}  # d: a data address
    assert reader.tags.count("figure") == reader.tags.count("figcaption") <= reader.tags.count("table")
    again = tmp_path / "again.html"
    report([tmp_path / "runs"], again)
    assert again.read_bytes() == out.read_bytes()


def test_colours_stand_out_on_both_backgrounds() -> None:
    style = (Path(sys.modules["fedfactor.report"].__path__[0]) / "templates" / "page.css").read_text()
    backgrounds = re.findall(r"--(?:back|soft): (#[0-9a-f]{6})", style)
    assert len(backgrounds) == 4
    assert min(contrast(colour, back) for colour in COLOURS for back in backgrounds) >= 3
    for name in ("text", "quiet", "link"):
        light, dark = re.findall(rf"--{name}: (#[0-9a-f]{{6}})", style)
        assert min(contrast(light, backgrounds[0]), contrast(light, backgrounds[1])) >= 4.5, name
        assert min(contrast(dark, backgrounds[2]), contrast(dark, backgrounds[3])) >= 4.5, name


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_fifty_groups_look_different() -> None:
    assert len({(colour(number), dash(number)) for number in range(50)}) == 50


def test_small_words() -> None:
    assert [amount(x, "B") for x in (0, 12, 999.9, 1000, 1.234e9)] == ["0 B", "12 B", "1 kB", "1 kB", "1.23 GB"]
    assert [span(x) for x in (1.234, 119, 180, 7200, 3 * 86400)] == ["1.23 s", "119 s", "3.0 min", "2.0 h", "3.0 d"]
    assert thin(range(100), 4) == [0, 33, 66, 99] and thin([1, 2], 4) == [1, 2]


def digits(method: str, **changes: Any) -> Any:
    base = {
        "data": {"name": "digits"},
        "partition": {"kind": "dirichlet", "clients": 6, "alpha": 0.5},
        "model": {"name": "digits_cnn", "width": 0.25},
        "method": {"name": method},
        "train": {"rounds": 2, "cohort": 3, "batch_size": 64, "lr": 0.05},
        "run": {"keep_rounds": [1]},
    }
    return resolve({**base, **changes})


def test_real_runs_of_methods_that_note_things(tmp_path: Path) -> None:
    widths = {"capacities": {"levels": [1.0, 0.5], "shares": [0.5, 0.5]}}
    run(digits("fedavg"), tmp_path / "fedavg")
    run(digits("local"), tmp_path / "local")
    run(digits("prism", **widths), tmp_path / "prism")
    run(digits("flanc", **widths), tmp_path / "flanc")
    found = of([tmp_path])
    drawn, told = figures(found), tables(found)
    notes = [getattr(element, "words", "") for element in elements(found)]
    examples = rows(drawn["examples-by-class-0"].table)
    assert len(examples) == 6 and sum(int(row["all"]) for row in examples) == 1438
    label = {group.method: group for group in read_groups([tmp_path])[0]}
    prism, flanc = label["prism"], label["flanc"]
    assert drawn[f"rank-{prism.slug}"].plot.data[0].x == (1, 2)
    assert any(name.startswith(f"picks-{prism.slug}-") for name in drawn)
    assert any(name.startswith(f"gram-{flanc.slug}-") for name in drawn)
    assert [
        trace.name
        for trace in next(one for name, one in drawn.items() if name.startswith(f"usage-{flanc.slug}-")).plot.data
    ] == ["width 1", "width 0.5"]
    assert any("part of each model is private" in words for words in notes)  # of Local's rank
    assert "accuracy-by-capacity" in drawn and "How many clients win and lose against Local" in told


def test_ranks_of_kept_rounds_are_those_of_the_models_there(tmp_path: Path) -> None:
    run(digits("fedpara"), tmp_path / "a")
    found = kept_ranks(read_run(tmp_path / "a", "a"))
    assert all([t for t, _ in points] == [1, 2] for points in found.values())
    for round, place in ((1, 0), (None, 1)):
        for name, weight in load(tmp_path / "a", round).model().named_parameters():
            if weight.dim() > 1:
                wanted = effective_rank(torch.linalg.svdvals(weight.detach().flatten(1)))
                assert found[name.removesuffix(".weight")][place][1] == pytest.approx(wanted, rel=1e-4)


def test_pictures_of_an_audit_are_shown(tmp_path: Path) -> None:
    folder, out = make_run(tmp_path / "a"), tmp_path / "report.html"
    picture = torch.rand(1, 2, 2)
    one = AttackResult(1, 0, [3], picture[None], picture[None], 0.5)

    def page(attacks: list[AttackResult]) -> str:
        AuditResult("a", "fedavg", {"mode": "gradient"}, attacks).write(folder / "audit-gradient.html")
        report([folder], out)
        return out.read_text()

    assert page([one]).count(base64.b64encode(png(picture)).decode()) == 2
    text = page([replace(one, round=round, client=client) for round in range(1, 6) for client in range(60)])
    assert text.count("<figure><img") == 100 and "pictures (100 of 300; all are in audit-gradient.html)" in text
    assert all(text.count(f"round {round}, client") == 20 for round in range(1, 6))  # evenly over the rounds
    data = (folder / "audit-gradient.json").read_text()
    (folder / "audit-gradient.json").write_text(re.sub(r'"originals": \[\s*"', '\\g<0>\\"><b>', data))
    report([folder], out)
    reader = Tags()
    reader.feed(out.read_text())
    assert "b" not in reader.tags and "&#34;&gt;&lt;b&gt;" in out.read_text()


def test_the_command(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    done = fedfactor("report", str(tmp_path / "a"), "-o", str(tmp_path / "r.html"))
    assert done.exit_code == 0, done.stderr
    assert "1 run of 1 setting" in done.stdout and (tmp_path / "r.html").stat().st_size > 1_000_000
    wrong = fedfactor("report", str(tmp_path / "b"), "-o", str(tmp_path / "r.html"))
    assert wrong.exit_code == 2 and "is not a run directory and contains none" in wrong.stderr
    wrong = fedfactor("report", str(tmp_path / "a"), "-o", str(tmp_path / "r.pdf"))
    assert wrong.exit_code == 2 and "ends in .html" in wrong.stderr


MISSING = [
    ("plotly", "from fedfactor.report import report; report([], 'r.html')", "report"),
    ("jinja2", "from fedfactor.report import report; report([], 'r.html')", "report"),
    ("jinja2", "import fedfactor.audit", "audit"),
    ("PIL", "import fedfactor.audit", "audit"),
]
HIDDEN = """
import sys
sys.modules |= dict.fromkeys(("plotly", "jinja2", "PIL"))
import fedfactor.report.comparison  # tables of a comparison need no optional package
for one in ("plotly", "jinja2", "PIL"):
    del sys.modules[one]
for missing, code, _ in {}:
    sys.modules[missing] = None
    try:
        exec(code)
        print("nothing was missed")
    except ImportError as error:
        print(error)
    del sys.modules[missing]
"""


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    """In one process: importing the library takes longest, and a module that could not be imported is tried again."""
    script = HIDDEN.format(MISSING)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (missing, _, extra), line in zip(MISSING, done.stdout.splitlines(), strict=True):
        assert missing in line and f"[{extra}]'" in line


def test_a_script_of_plotly_that_is_built_differently_is_used_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(plotly_script()) < len(get_plotlyjs())  # else the cut does nothing, and should go
    monkeypatch.setattr("fedfactor.report.sections.get_plotlyjs", lambda: "/* plotly */ window.Plotly = {}")
    assert plotly_script() == "/* plotly */ window.Plotly = {}"


def test_what_privacy_spent_and_which_numbers_stayed_private(tmp_path: Path) -> None:
    settings = {"clip": 1.0, "delta": 1e-5, "noise": 1.0, "sampling": "none"}
    for method in ("fedpara", "pfedpara"):
        layers = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        examples = torch.randn(40, 4), torch.zeros(40, dtype=torch.long)
        chosen = {"method": method, "clients": 4, "rounds": 2, "evaluate_clients": "all", "privacy": settings}
        simulate(layers, examples, test=examples, directory=tmp_path / method, **chosen)
    groups, remarks = read_groups([tmp_path])
    section = next(one for one in sections(groups, remarks) if one.name == "privacy")
    table, curve, against = section.elements[:3]
    assert isinstance(table, Table) and isinstance(curve, Figure) and isinstance(against, Figure)
    sent, kept = table.head.index("numbers sent"), table.head.index("numbers kept private")
    rows = {row[0]: row for row in table.rows}

    def number(text: str) -> int:
        return int(text.replace(",", ""))

    everything, part = rows["fedpara"], rows["pfedpara"]
    assert everything[kept] == "0" < part[kept] and number(part[sent]) < number(everything[sent])
    assert "protects nobody" in everything[-1] and everything[1] == part[1] == curve.table.rows[-1][1]
