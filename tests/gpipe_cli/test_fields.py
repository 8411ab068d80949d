"""One value of one setting: what is taken, what is refused, and how that is said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from gpipe_cli.errors import ConfigError
from gpipe_cli.fields import about, did_you_mean, read, setting


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int = setting("how wide", at_least=1)


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = field(metadata=about("the inner one"))
    count: int = setting("how many", default=1, at_least=1)
    share: float = setting("which part", default=0.0, at_least=0, below=1)
    limit: float | None = setting("how far", default=None, above=0)
    on: bool = setting("whether", default=False)
    mode: Literal["fast", "safe"] = setting("in which way", default="safe")
    name: str = setting("what it is called", default="x")
    sizes: tuple[int, ...] | None = setting("how large", default=None, at_least=1)
    pair: tuple[float, float] = setting("two numbers", default=(0.0, 0.0))
    options: dict[str, Any] = field(default_factory=dict, metadata=about("anything"))


def outer(**values: object) -> Outer:
    return read(Outer, {"inner": {"width": 1}, **values})


@pytest.mark.parametrize(
    ("key", "given", "taken"),
    [
        ("count", 3, 3),
        ("share", 0, 0.0),
        ("share", 0.5, 0.5),
        ("limit", 1e30, 1e30),
        ("limit", None, None),
        ("on", True, True),
        ("mode", "fast", "fast"),
        ("name", 2024, "2024"),
        ("sizes", [3, 2], (3, 2)),
        ("sizes", None, None),
        ("pair", [1, 2], (1.0, 2.0)),
        ("options", {"a": [1]}, {"a": [1]}),
    ],
)
def test_a_fitting_value_has_the_declared_type(key: str, given: object, taken: object) -> None:
    value = getattr(outer(**{key: given}), key)
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("key", "given", "line"),
    [
        ("count", 4.5, "count=4.5: expected a whole number, 1 or more"),
        ("count", 4.0, "count=4: expected a whole number, 1 or more"),
        ("count", True, "count=true: expected a whole number, 1 or more"),
        ("count", "4", "count='4': expected a whole number, 1 or more"),
        ("count", 0, "count=0: expected a whole number, 1 or more"),
        ("count", None, "count=null: needs a whole number, 1 or more: how many"),
        ("share", 1.0, "share=1: expected a number, 0 or more and less than 1"),
        ("share", float("nan"), "share=nan: expected a number, 0 or more and less than 1"),
        ("share", "abc", "share=abc: expected a number, 0 or more and less than 1"),
        ("share", False, "share=false: expected a number, 0 or more and less than 1"),
        ("limit", 0, "limit=0: expected a number, more than 0, or null"),
        ("limit", float("inf"), "limit=inf: expected a number, more than 0, or null"),
        ("on", 1, "on=1: expected true or false"),
        ("on", "true", "on='true': expected true or false"),
        ("mode", "quick", "mode=quick: expected one of fast, safe"),
        ("mode", ["fast"], "mode=[fast]: expected one of fast, safe"),
        ("name", "", "name=: expected text"),
        ("name", True, "name=true: expected text"),
        ("sizes", [], "sizes=[]: expected a list such as [3,2] of whole numbers, 1 or more, or null"),
        ("sizes", [3, 0], "sizes=[3,0]: expected a list such as [3,2] of whole numbers, 1 or more, or null"),
        ("sizes", 3, "sizes=3: expected a list such as [3,2] of whole numbers, 1 or more, or null"),
        ("pair", [1], "pair=[1]: expected a list of 2 numbers"),
        ("options", "a", "options=a: expected KEY=VALUE pairs"),
        ("inner", None, "inner=null: choose one by its name, inner=NAME, and set its keys with inner.KEY=VALUE"),
        ("inner", {"width": 0}, "inner.width=0: expected a whole number, 1 or more"),
        ("inner", {"width": 1, "widht": 2}, "inner.widht=2: unknown key; did you mean width?"),
        ("inner", {}, "inner.width=null: is required but the configuration does not set it"),
        ("cuont", 1, "cuont=1: unknown key; did you mean count?"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_one_line(key: str, given: object, line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        outer(**{key: given})
    assert str(refusal.value) == line


def test_nothing_is_suggested_for_a_word_that_is_near_to_none() -> None:
    assert did_you_mean("zzz", ["count"]) == ""
