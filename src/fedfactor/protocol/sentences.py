"""Mistakes in settings as sentences: what is wrong, where, what was expected and the nearest legal word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fedfactor.support.checks import near

RENAMED_KEYS = {
    "train.batch": "train.batch_size",
    "train.clip": "train.max_grad_norm",
    "data.least": "data.min_examples",
    "partition.least": "partition.min_examples",
    "partition.k": "partition.classes_per_client",
    "partition.shards": "partition.shards_per_client",
}
"""Keys of recipes that have a new name: a recipe with the old one is refused, and the error says both."""

EXPECTED = {
    "int_type": "a whole number", "float_type": "a number", "finite_number": "a finite number",
    "bool_type": "true or false", "string_type": "a string", "list_type": "a list", "tuple_type": "a list",
    "dict_type": "a table", "mapping_type": "a table", "model_type": "a table",
    "dataclass_exact_type": "a {class_name}", "literal_error": "{expected}", "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}", "less_than_equal": "at most {le:g}",
}  # fmt: skip
"""What a value should have been, by the type of pydantic's error."""

LONGEST_VALUE = 100
"""Characters of a value up to which an error about a whole table repeats it."""


def sentence(error: ValidationError, given: Any, fields: Mapping[str, FieldInfo], section: str = "") -> str:
    """Return the mistakes that pydantic found in a table, on one line; `fields` are the table's legal fields."""
    found: list[str] = []
    expected: dict[tuple[str, str], list[str]] = {}
    for item in error.errors():
        kind, loc, context = item["type"], item["loc"], item.get("ctx", {})
        path, got = [section] if section else [], given
        for part in loc:
            try:
                got = got[part]
            except (KeyError, IndexError, TypeError):  # no key, but pydantic's name for a branch of a union
                continue
            path.append(str(part))
        key = ("each key of " if loc[-1:] == ("[key]",) else "") + ".".join(path)
        if kind == "missing":
            found.append(f"{key}.{loc[-1]} is missing and has no default")
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            found.append(_unknown(key, list(fields) if len(loc) == 1 else _keys(fields[str(loc[0])].annotation)))
        elif kind == "value_error":
            shown = f", got {got!r}" if key and len(repr(got)) <= LONGEST_VALUE else ""
            found.append(f"{key} {context['error']}".lstrip() + shown)
        elif kind in EXPECTED:
            words = EXPECTED[kind].format(**context)
            if kind == "literal_error" and isinstance(got, str):
                words += near(got, _words(fields[str(loc[0])].annotation), " (did you mean {!r}?)")
            expected.setdefault((key, repr(got)), []).append(words)
        else:
            found.append(f"{key}: {item['msg']}, got {got!r}")
    found += [
        f"{key} should be {' or '.join(dict.fromkeys(words))}, got {got}" for (key, got), words in expected.items()
    ]
    return "; ".join(found)


def _unknown(key: str, legal: list[str]) -> str:
    renamed = RENAMED_KEYS.get(key, "")
    if renamed.rpartition(".")[2] in legal:
        return f"{key} is now {renamed}"
    return f"there is no key {key!r}; {near(key.rpartition('.')[2], legal)}legal are {', '.join(legal) or 'none'}"


def _words(annotation: Any) -> list[str]:
    """Return the words of the literals in a type."""
    return [word for one in get_args(annotation) for word in ([one] if isinstance(one, str) else _words(one))]


def _keys(annotation: Any) -> list[str]:
    """Return the fields of the dataclasses in a type."""
    own = list(getattr(annotation, "__pydantic_fields__", ()))
    return own or [key for one in get_args(annotation) for key in _keys(one)]
