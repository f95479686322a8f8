"""Checks of settings, and hints for misspelt names."""

from __future__ import annotations

import math

import pytest

from fedfactor.support.checks import check_choice, check_number, near


def test_the_nearest_word_is_hinted_at() -> None:
    assert near("fedpra", ["fedavg", "fedpara"]) == "did you mean 'fedpara'? "
    assert near("sel", ["none", "selected"]) == "did you mean 'selected'? "  # the beginning of a long word
    assert near("xyz", ["fedavg"]) == near("", ["fedavg"]) == ""
    assert near("fedpra", ["fedpara"], " ({})") == " (fedpara)"


@pytest.mark.parametrize("value", [0, 0.5, 1, 1.0])
def test_numbers_in_their_range_pass(value: float) -> None:
    check_number("share", value, 0, 1)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, True, "1", None])
def test_other_numbers_are_named_with_their_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"^share must be a number, in \[0, 1\], got "):
        check_number("share", value, 0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1.0, 0, True, math.inf])
def test_whole_numbers_are_no_floats(value: float) -> None:
    check_number("rank", 1, 1, whole=True)
    with pytest.raises(ValueError, match=r"^rank must be a whole number, at least 1, got "):
        check_number("rank", value, 1, whole=True)


def test_choices_are_listed() -> None:
    check_choice("kind", "a", iter(["a", "b"]))
    with pytest.raises(ValueError, match=r"^kind must be one of a, b, got 'c'$"):
        check_choice("kind", "c", iter(["a", "b"]))
