"""Make pages of the site when it is built, from the registries, the command line, the tables and the evidence.

mkdocs calls `on_config`, `on_files` and `on_page_markdown`; everything else takes and returns plain text.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import posixpath
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import click
import tomli_w
import typer

from fedfactor import cli
from fedfactor.cli.new import method_text, recipe_text
from fedfactor.data.partitions import kinds as partitions
from fedfactor.data.sources.registry import info as source_info
from fedfactor.data.sources.registry import names as source_names
from fedfactor.models import info as model_info
from fedfactor.models import list_models as model_names
from fedfactor.protocol.fleet import PROFILES
from fedfactor.protocol.method import Method
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.sentences import RENAMED_KEYS
from fedfactor.registry import Entry, entries
from fedfactor.runs import catalog
from fedfactor.runs.recipe import cells, read
from fedfactor.tables.row import VERDICTS, Row
from fedfactor.testing import PROMISES

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
RULINGS = ("holds", "fails", "undecided")


# Text.


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace(chr(10), ' ') for cell in row)} |" for row in rows)])


def prose(text: str) -> str:
    """Escape the characters that have a meaning in Markdown, except within `code`."""
    parts = re.split("(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_|\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts
    )


def code(text: str) -> str:
    """Write a word as code, also within a table."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def block(language: str, text: str) -> str:
    """Write a block of code."""
    return f"```{language}\n{text.strip()}\n```"


def paper_link(paper: str) -> str:
    """Link a paper that has an address."""
    return f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})" if paper.startswith("arXiv:") else paper


# Methods, optimizers and codecs.


@dataclasses.dataclass(frozen=True)
class Said:
    """A docstring, sorted by what its paragraphs are about."""

    summary: str
    body: list[str]
    deviations: list[str]
    source: list[str]
    use: list[str]


def said(cls: type) -> Said:
    """Sort the paragraphs of a class's docstring."""
    summary, *rest = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    found: dict[str, list[str]] = defaultdict(list)
    heads = {"Deviations:": "deviations", "Follows": "source", "Use it": "use"}
    for paragraph in rest:
        found[next((kind for head, kind in heads.items() if paragraph.startswith(head)), "body")].append(
            _sentence(prose(paragraph.removeprefix("Deviations:")))
        )
    return Said(prose(summary), *(found[kind] for kind in ("body", "deviations", "source", "use")))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def fields(entry: Entry) -> str:
    """Tabulate an entry's hyper-parameters."""
    rows = [
        [code(item["name"]), code(str(item["type"])), code(json.dumps(item["default"])), prose(item["help"])]
        for item in entry.fields()
    ]
    return table(["field", "type", "default", "meaning"], rows) if rows else "It has no hyper-parameters."


def in_a_recipe(entry: Entry) -> str:
    """Write an entry as a section of a recipe, with its defaults."""
    given = {item["name"]: item["default"] for item in entry.fields() if item["default"] not in (None, "inf")}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    return block("toml", tomli_w.dumps({entry.kind.removesuffix("s"): {"name": entry.name, **plain}}))


def hooks(cls: type, base: type) -> str:
    """Tabulate what a class does differently from the base, hook by hook."""
    found: dict[str, str] = {}
    for name, value in inspect.getmembers(base):
        mine = inspect.getattr_static(cls, name, None)
        if name.startswith("_") or (not callable(value) and not isinstance(value, property)):
            continue
        if mine is not inspect.getattr_static(base, name):
            function = mine.fget if isinstance(mine, property) else mine
            found[name] = inspect.cleandoc(getattr(function, "__doc__", "") or "").partition("\n\n")[0]
    return table(["hook", "what it does here"], [[code(name), prose(text)] for name, text in found.items()])


def refusals(method: Method) -> list[str]:
    """Return which optimizers and codecs a method refuses, with the reasons."""
    found: dict[str, list[str]] = defaultdict(list)
    plain = {kind: {name: entry.cls() for name, entry in entries(kind).items()} for kind in ("optimizers", "codecs")}
    for name, optimizer in plain["optimizers"].items():
        reason = method.refuses(optimizer, plain["codecs"]["float32"])
        if reason:
            found[reason].append(name)
    for name, codec in plain["codecs"].items():
        reason = method.refuses(plain["optimizers"]["fedavg"], codec)
        if reason:
            found[reason].append(name)
    return [f"not with {', '.join(map(code, names))}: {prose(reason)}" for reason, names in found.items()]


@functools.cache
def recipes() -> dict[str, set[str]]:
    """Return the names of all packaged recipes, with the methods of their cells."""
    return {
        name: {cell.get("method", {}).get("name", "fedavg") for cell in cells(read(catalog.packaged(name))).values()}
        for name in catalog.names()
    }


@functools.cache
def records() -> dict[str, set[str]]:
    """Return the records of the evidence by file name, with the methods that ran."""
    return {
        path.name: {item["recipe"]["method"]["name"] for item in json.loads(path.read_text())}
        for path in EVIDENCE.glob("*.json")
    }


def evidence_of(method: str) -> list[str]:
    """Return the names of the evidence pages whose records hold runs of a method."""
    names = [name for name, ran in records().items() if method in ran]
    return [path.name for path in evidence_pages() if any(f"`{name}`" in path.read_text() for name in names)]


def method_page(entry: Entry) -> str:
    """Write the page of one method."""
    text, cls = said(entry.cls), entry.cls
    method: Method = cls()
    parts = [f"# {cls.__name__}", text.summary, *text.body]
    if entry.paper:
        parts.append(f"Paper: {paper_link(entry.paper)}.")
    parts += [*_headed("When to use it", text.use), *_headed("Where the definition comes from", text.source)]
    parts += _headed("Deviations", text.deviations)
    parts += ["## Fields", fields(entry), in_a_recipe(entry)]
    alike = {"samples": "by their number of examples", "uniform": "all alike"}
    facts = [
        f"clients count {alike.get(method.traits.weighting, prose(method.traits.weighting))}",
        "weaker clients get a smaller network" if method.traits.adapts else "everybody has the same network",
        *(["every client has a model of its own on the server"] if method.traits.space == "personal" else []),
        *(
            ["statistics of norms are gathered from the clients before a model is used"]
            if method.traits.calibrates
            else []
        ),
        *(refusals(method) or ["goes with every optimizer and codec"]),
    ]
    parts += ["## In short", "\n".join(f"- {fact}" for fact in facts)]
    if cls.__mro__[1] is not object and hooks(cls, Method).count("\n") > 1:
        parts += ["## What it does that FedAvg does not", hooks(cls, Method)]
    parts += ["## Evidence", *evidence(entry.name)]
    return "\n\n".join(parts) + "\n"


def evidence(method: str) -> Iterator[str]:
    """Link what was measured with a method, and the commands that measure it."""
    pages = evidence_of(method)
    if pages:
        yield "Measured results, with verdicts on the papers' claims:"
        yield "\n".join(f"- [{heading(EVIDENCE / name)}](../evidence/{name})" for name in pages)
    else:
        yield "Tested by the [promises](../architecture.md#promises) like each method; no run of the papers yet."
    found = [name for name, ran in recipes().items() if method in ran]
    if found:
        yield "Recipes that run it:"
        yield block("sh", "\n".join(f"fedfactor run {name}" for name in found))


def _headed(title: str, paragraphs: list[str]) -> list[str]:
    return [f"## {title}", *paragraphs] if paragraphs else []


def kind_page(kind: str, title: str, lead: str) -> str:
    """Write one page for all optimizers or codecs."""
    parts = [f"# {title}", lead]
    for name, entry in entries(kind).items():
        text = said(entry.cls)
        parts += [f"## {name}", text.summary, *text.body, *text.use, *text.source, *text.deviations]
        if entry.paper:
            parts.append(f"Paper: {paper_link(entry.paper)}.")
        parts += [fields(entry), in_a_recipe(entry)]
        if kind == "optimizers" and hooks(entry.cls, Optimizer).count("\n") > 1:
            parts.append(hooks(entry.cls, Optimizer))
    return "\n\n".join(parts) + "\n"


# Results.


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper, the result here, and the commands that measured it."""

    page: str
    section: str
    commands: tuple[str, ...]
    claim: str
    found: str

    @property
    def rulings(self) -> list[str]:
        """The verdicts in the result, in their order."""
        return [word for word in re.findall(r"\w+", self.found.lower()) if word in RULINGS]


def evidence_pages() -> list[Path]:
    """Return the pages of evidence, without the README that explains them."""
    return sorted(path for path in EVIDENCE.glob("*.md") if path.name != "README.md")


def heading(path: Path) -> str:
    """Return the first heading of a page."""
    return next(line for line in path.read_text().splitlines() if line.startswith("# ")).removeprefix("# ")


def claims(path: Path) -> list[Claim]:
    """Return the claims of a page of evidence: bullets below a command that begin with the claim in italics."""
    found = []
    for section in re.split("^## ", path.read_text(), flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        words = re.findall(r'^ *([A-Z]+)="(.*)"$', text, flags=re.M)
        lines = re.findall(r"^(?:    )?(fedfactor .*|python .*)$", text, flags=re.M)
        commands = [_spoken(line, words) for line in lines]
        for bullet in re.findall(r"^- (\*[^*].*?)(?=^- |^\n|\Z)", text, flags=re.M | re.S):
            claim, _, outcome = " ".join(bullet.split())[1:].partition("*")
            ruled = Claim(path.name, title, tuple(commands), claim, outcome.lstrip(":, "))
            if ruled.rulings:
                found.append(ruled)
    return found


def _spoken(command: str, words: Sequence[tuple[str, str]]) -> str:
    """Replace shell variables by their values: readers copy one command, not the whole block."""
    for name, value in words:
        command = command.replace(f"${name}", value)
    return command


def claims_table() -> str:
    """Tabulate all claims."""
    rows = []
    for path in evidence_pages():
        rows += [
            [
                prose(one.section),
                prose(one.claim),
                one.found,
                "<br>".join(map(code, one.commands)),
                f"[figures](evidence/{one.page})",
            ]
            for one in claims(path)
        ]
    return table(["paper", "its claim", "here", "command", ""], rows)


def counts_table(rows: Sequence[Row]) -> str:
    """Count the verdicts on the papers' printed figures, with one row per table."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row.paper, row.table][row.verdict] += 1
    lines = [
        [paper, name, *(str(found[verdict] or "") for verdict in VERDICTS), code(f"fedfactor tables --paper {paper}")]
        for (paper, name), found in counts.items()
    ]
    total = Counter(row.verdict for row in rows)
    lines.append(["all", "", *(f"**{total[verdict]}**" for verdict in VERDICTS), code("fedfactor tables")])
    return table(["paper", "table", *VERDICTS, "command"], lines)


def differences_table(rows: Sequence[Row]) -> str:
    """List the printed figures that differ from ours, with the reason if it is known."""
    found = [row for row in rows if row.verdict in ("misprint", "off")]
    return table(
        ["paper", "table", "cell", "printed", "error", "verdict", "why"],
        [
            [
                row.paper,
                row.table,
                prose(f"{row.row}: {row.quantity}"),
                prose(row.printed),
                f"{100 * row.relative_error:+.1f} %",
                row.verdict,
                prose(row.remark),
            ]
            for row in found
        ],
    )


def results_page(rows: Sequence[Row]) -> str:
    """Write the page with all verdicts on the papers."""
    everything = [one for path in evidence_pages() for one in claims(path)]
    ruled = Counter(word for one in everything for word in one.rulings)
    return "\n\n".join(
        [
            "# Results against the papers",
            "This page has two kinds of checks: the papers' claims about training, tested on real data at a small "
            "scale, and the counts that the papers print, recomputed. It is built from the code and the records.",
            "## Claims about training",
            f"{len(everything)} claims. They, or parts of them, hold {ruled['holds']} times, fail {ruled['fails']} "
            f"times and are undecided {ruled['undecided']} times. A claim holds or fails only if the gap exceeds the "
            "spread of both sides: see [Evidence](evidence/README.md). These are runs of minutes on two cores. They do "
            "not say what the papers' full scale gives.",
            claims_table(),
            "## Printed counts",
            "Parameters, operations, ratios and times, recomputed by building the models. `match`: our figure rounds "
            "to the printed digits. `truncated`: it gives them if further digits are cut off. `close`: within half a "
            "per cent. `misprint`: the paper contradicts itself. `off`: none of these.",
            counts_table(rows),
            "The figures that differ:",
            differences_table(rows),
            "",
        ]
    )


# The command line and what a recipe can name.


def commands_page() -> str:
    """Write the reference of the command line."""
    parts = ["# Commands", "`--help` after each command prints the same."]

    def walk(command: Any, words: list[str]) -> None:
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                walk(inner, [*words, name])
            return
        usage = " ".join([*words, *(_argument(p) for p in command.params if p.param_type_name == "argument")])
        rows = [
            [code(", ".join(p.opts) if p.param_type_name == "option" else _argument(p)), prose(p.help or ""), _shown(p)]
            for p in command.params
            if p.name != "help"
        ]
        parts.extend([f"## {' '.join(words)}", prose(command.help or ""), block("sh", usage)])
        parts.append(table(["", "", "default"], rows))

    walk(typer.main.get_command(cli.app), ["fedfactor"])
    return "\n\n".join(parts) + "\n"


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper()
    return f"{name}..." if parameter.nargs == -1 and not name.endswith("...") else name


def _shown(parameter: click.Parameter) -> str:
    default = parameter.default
    usual = any(default is one for one in (None, False)) or default in ("", ()) or callable(default)
    usual = usual or type(default).__name__ == "Sentinel"  # click's word for none
    return "" if usual else code(str(default))


def keys_page() -> str:
    """Write the reference of all keys of a recipe, from the schema in the package."""
    whole = json.loads((ROOT / "src" / "fedfactor" / "runs" / "recipe.schema.json").read_text())

    def resolved(one: dict[str, Any]) -> dict[str, Any]:
        """Return the definition that a reference leads to."""
        return whole["$defs"][one["$ref"].rpartition("/")[2]] if one.get("$ref", "#") != "#" else one

    def keys(properties: dict[str, Any], prefix: str) -> Iterator[list[str]]:
        for key, one in properties.items():
            default = "" if one.get("default") is None else json.dumps(one["default"])
            yield [code(prefix + key), prose(_values(one)), code(default), prose(_sentence(one.get("description", "")))]
            for inner in [] if chosen(one) else one.get("anyOf", []):
                yield from keys(resolved(inner).get("properties", {}), f"{prefix}{key}.")
            if isinstance(named := one.get("additionalProperties"), dict):
                yield from keys(resolved(named).get("properties", {}), f"{prefix}{key}.NAME.")

    def listed(properties: dict[str, Any], prefix: str = "") -> list[str]:
        rows = list(keys({key: one for key, one in properties.items() if "const" not in one}, prefix))
        return [table(["key", "value", "default", "meaning"], rows)] if rows else []

    def chosen(one: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the forms of a table whose options depend on a name."""
        forms = [resolved(form) for form in one.get("anyOf", [])]
        return [form for form in forms if any("const" in each for each in form.get("properties", {}).values())]

    def choices(path: str, one: dict[str, Any]) -> list[str]:
        named, parts = chosen(one), list[str]()
        common = {
            key: each
            for key, each in named[0]["properties"].items()
            if all(form["properties"].get(key) == each for form in named)
        }
        if common:
            parts += [f"Each `{path}` takes:" if "." in path else "Each of them takes:", *listed(common, f"{path}.")]
        for form in named:
            key, choice = next((key, each["const"]) for key, each in form["properties"].items() if "const" in each)
            own = {key: each for key, each in form["properties"].items() if key not in common}
            parts += [f"### {path}.{key} = `{choice}`", prose(_sentence(form.get("description", "")))]
            parts += listed(own, f"{path}.")
        rest = [resolved(form) for form in one["anyOf"] if resolved(form) not in named]
        return parts + [prose(form["description"]) for form in rest if "description" in form]

    outside = {key: one for key, one in whole["properties"].items() if one.get("type") in ("string", "integer")}
    parts = ["# Recipe keys", KEYS, "## Keys outside of sections", *listed(outside)]
    for section, one in whole["properties"].items():
        if section in outside:
            continue
        parts += [f"## [{section}]", prose(one["description"])]
        if chosen(one):
            parts += choices(section, one)
            continue
        properties = {} if section in FREE else resolved(one)["properties"]
        parts += listed(properties, f"{section}.")
        for key, inner in properties.items():
            parts += choices(f"{section}.{key}", inner) if chosen(inner) else []
    return "\n\n".join(filter(None, parts)) + "\n"


FREE = ("paper", "small", "sweep")
"""Sections without keys of their own."""
KEYS = """This page lists all keys of a [recipe](recipes.md) with their legal values, defaults and meanings. It is
generated from the JSON Schema in the package. `fedfactor recipes schema` prints this schema together with your own
plug-ins."""


def _values(value: dict[str, Any]) -> str:
    """Describe the legal values of a key."""
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_values(one) for one in value["anyOf"] if one.get("type") != "null"))
    if "$ref" in value or value.get("type") == "object":
        return "table"
    if "enum" in value:
        return ", ".join(f"`{json.dumps(one)}`" for one in value["enum"])
    if value.get("type") == "array":
        return f"list of {_values(value['items'])}" if value.get("items") else "list"
    low, above, high = value.get("minimum"), value.get("exclusiveMinimum"), value.get("maximum")
    limits = [f"at least {low}"] if low is not None else [f"above {above}"] if above is not None else []
    limits += [f"at most {high}"] if high is not None else []
    return " ".join([value.get("type", "any value"), ", ".join(limits)]).strip()


def names_table(which: str) -> str:
    """Tabulate other things that a recipe can name: data sets, partitions or models."""
    if which == "data":
        found = [(name, source_info(name)) for name in source_names()]
        rows = [[code(name), prose(one.summary), code(", ".join(one.options))] for name, one in found]
        return table(["data.name", "what it is", "options"], rows)
    if which == "partitions":
        shown = {kind: [f.name for f in dataclasses.fields(cls)] for kind, cls in partitions().items()}
        rows = [
            [code(kind), prose(inspect.cleandoc(cls.__doc__ or "")), code(", ".join(shown[kind]))]
            for kind, cls in partitions().items()
        ]
        return table(["partition.kind", "what it is", "options"], rows)
    builders = {name: model_info(name) for name in model_names()}
    rows = [
        [
            code(name),
            prose(one.paper),
            code(" x ".join(map(str, one.input_shape or ()))),
            code(", ".join(inspect.signature(one.builder).parameters)),
        ]
        for name, one in builders.items()
    ]
    return table(["model.name", "from", "input", "options"], rows)


def recipes_table() -> str:
    """List the packaged recipes with their descriptions."""
    rows = [[code(f"fedfactor run {name}"), prose(catalog.description(name))] for name in catalog.names()]
    return table(["command", "what it is"], rows)


def example(path: Path) -> str:
    """Show an example's command and its file."""
    return block("sh", f"python examples/{path.name}") + "\n\n" + block("python", path.read_text())


# What mkdocs calls.


def devices_table() -> str:
    """Tabulate the built-in devices with the sources of their numbers."""
    rows = [
        [code(name), prose(profile.summary), code(key), f"{value:g}", prose(source)]
        for name, profile in PROFILES.items()
        for key, (value, source) in profile.numbers.items()
    ]
    return table(["profile", "what it is", "key", "value", "source"], rows)


MARKED: dict[str, Callable[[], str]] = {
    "promises": lambda: table(
        ["promise", "what it means"], [[code(one.__name__), prose(one.__doc__ or "")] for one in PROMISES]
    ),
    "new method": lambda: block("python", method_text("my_method")),
    "new recipe": lambda: block("toml", recipe_text("my_recipe")),
    "recipes": recipes_table,
    "devices": devices_table,
    "data": lambda: names_table("data"),
    "partitions": lambda: names_table("partitions"),
    "models": lambda: names_table("models"),
    **{f"example {path.stem}": functools.partial(example, path) for path in (ROOT / "examples").glob("*.py")},
    "renamed": lambda: table(["old key", "new key"], [[code(old), code(new)] for old, new in RENAMED_KEYS.items()]),
}
"""Functions that return the text for `<!-- made: NAME -->` in a page."""

OPTIMIZERS = """An optimizer decides how clients correct their gradients and how the server applies the mean of their
changes. It can be combined with each method that does not refuse it. Set it with `[optimizer]` in a recipe or
`optimizer=` in Python."""
CODECS = """A codec encodes the tensors of a message. The reported bytes are those of the encoded message. Set it with
`[codec]` in a recipe or `codec=` in Python."""


COPIED = {
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages of the site that are files outside of docs/, and where they are on the site."""


def linked(markdown: str, source: str) -> str:
    """Replace links that work in the repository by links that work on the site.

    Links to files that the site has as pages lead to these pages. A method's name leads to the method's page. Other
    links, to source code, are replaced by their text.
    """
    folder = PurePosixPath(COPIED.get(source, source.removeprefix("docs/"))).parent

    def turned(found: re.Match[str]) -> str:
        text, target, anchor = found["text"], found["target"], found["anchor"] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if text.strip("`") in entries("methods") and path.startswith("src/fedfactor/methods/"):
            place = f"methods/{text.strip('`')}.md"
        elif path in COPIED or path.startswith("docs/"):
            place = COPIED.get(path, path.removeprefix("docs/"))
        else:
            return text
        return f"[{text}]({posixpath.relpath(place, folder)}{anchor})"

    return re.sub(r"(?<!!)\[(?P<text>[^]]*)\]\((?!\w+:|#)(?P<target>[^)#]+)(?P<anchor>#[^)]*)?\)", turned, markdown)


def pages(rows: Callable[[], Sequence[Row]]) -> dict[str, str]:
    """Return all generated pages by their path on the site; `rows` returns the papers' recomputed figures."""
    return {
        **{f"methods/{name}.md": method_page(entry) for name, entry in entries("methods").items()},
        "optimizers.md": kind_page("optimizers", "Optimizers", OPTIMIZERS),
        "codecs.md": kind_page("codecs", "Codecs", CODECS),
        "commands.md": commands_page(),
        "results.md": results_page(rows()),
        **{place: linked((ROOT / source).read_text(), source) for source, place in COPIED.items()},
    }


def with_made(markdown: str) -> str:
    """Replace the marks of a page by the text that is generated for them."""
    return re.sub(r"<!-- made: (.*?) -->", lambda mark: MARKED[mark[1]](), markdown)


def on_config(config: Any) -> Any:
    """List the pages of methods and of evidence in the navigation."""
    methods = ["methods.md", *({name: f"methods/{name}.md"} for name in entries("methods"))]
    shown = [f"evidence/{path.name}" for path in evidence_pages()]
    for item in config.nav:
        if "Methods" in item:
            item["Methods"] = methods
        if "Evidence" in item:
            item["Evidence"] = [*item["Evidence"], *shown]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    from fedfactor.tables import compute

    for place, content in pages(compute).items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the marks of a page in docs/, and replace its links by links of the site."""
    source = f"docs/{page.file.src_uri}"
    return linked(with_made(markdown), source) if (ROOT / source).exists() else markdown


if __name__ == "__main__":  # one page: python docs/pages.py keys.md > docs/keys.md
    from fedfactor.tables import compute

    sys.stdout.write(keys_page() if sys.argv[1] == "keys.md" else pages(compute)[sys.argv[1]])
