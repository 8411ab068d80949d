"""Declaring a setting and checking one value of it: the generic half of `gpipe_cli.config`.

A setting is a dataclass field. Its annotation is its type, `Literal` lists its choices, and `setting(...)` adds the
help text and the bounds. `read` turns a plain mapping into such a dataclass and refuses anything that does not fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from gpipe_cli.errors import ConfigError, as_typed

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Allowed numbers: at_least <= value, above < value, value <= at_most, value < below."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def allow(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = [(self.at_least, "{} or more"), (self.above, "more than {}")]
        parts += [(self.at_most, "at most {}"), (self.below, "less than {}")]
        return " and ".join(text.format(as_typed(bound)) for bound, text in parts if bound is not None)


def setting(help_text: str, *, default: Any = dataclasses.MISSING, **bounds: float) -> Any:
    """Field of a config dataclass: what it means, and the bounds of its numbers (see Bounds).

    A `default` is for settings that only some choices of a group have (`dataset.path`): it is the neutral value where
    the YAML file does not list the key. Every other value comes from `conf/`.
    """
    return dataclasses.field(default=default, metadata=about(help_text, **bounds))


def one_or_more(help_text: str, **bounds: float) -> Any:
    """Field of a tuple for which a single value may be typed: `remat=full` and `remat=[full,none]`."""
    return dataclasses.field(metadata={**about(help_text, **bounds), "one_or_more": True})


def about(help_text: str, **bounds: float) -> dict[str, Any]:
    """Metadata of a setting, for fields that need more than a plain default (groups, mappings)."""
    return {"help": help_text, "bounds": Bounds(**bounds)}


def read(cls: type[T], values: Mapping[str, object], prefix: str = "") -> T:
    """Dataclass `cls` from a plain mapping (nested dataclasses from nested mappings).

    Raises ConfigError, naming the dotted key, for a key that is unknown or missing and for a value of the wrong type,
    outside its bounds or not among its choices.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(prefix + str(key), value, f"unknown key{did_you_mean(str(key), fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _convert(prefix + name, values[name], hints[name], field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(prefix + name, None, "is required but the configuration does not set it")
    return cls(**arguments)


def allowed(hint: object, metadata: Mapping[str, Any]) -> str:
    """What a field takes, in words: "a whole number, 1 or more", "one of gpipe, 1f1b"."""
    hint, optional = _without_none(hint)
    bounds = metadata["bounds"]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if metadata.get("one_or_more"):
        single = allowed(arguments[0], {"bounds": bounds})
        return f"{single}; or a list of them" + (", or null" if optional else "")
    if _is_union(hint):  # a number, or one of the words that stand for none
        words = [str(word) for option in arguments[1:] for word in typing.get_args(option)]
        return ", or ".join([allowed(arguments[0], {"bounds": bounds}), *words, *(["null"] if optional else [])])
    if origin is typing.Literal:
        text = "one of " + ", ".join(map(str, arguments))
    elif origin is tuple and arguments[-1] is Ellipsis:
        example = "[a,b]" if arguments[0] is str else "[3,2]"
        text = f"a list such as {example} of {_WORDS[arguments[0]][1]}"
    elif origin is tuple:
        text = f"a list of {len(arguments)} {_WORDS[arguments[0]][1]}"
    elif origin is dict:
        text = "KEY=VALUE pairs"
    else:
        text = _WORDS[hint][0]
    return text + (f", {bounds}" if str(bounds) else "") + (", or null" if optional else "")


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """ "; did you mean X?" for the nearest candidate, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(candidates), n=1)
    return f"; did you mean {near[0]}?" if near else ""


_WORDS: dict[object, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
}


def _without_none(hint: object) -> tuple[Any, bool]:
    """(X, True) for `X | None`, else (hint, False)."""
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if not _is_union(hint) or len(options) == len(typing.get_args(hint)):
        return hint, False
    return typing.Union[tuple(options)], True  # noqa: UP007 (as many as there are)


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _convert(key: str, value: object, hint: object, metadata: Mapping[str, Any]) -> object:
    inner, optional = _without_none(hint)
    if value is None and optional:
        return None
    if dataclasses.is_dataclass(inner):
        if not isinstance(value, Mapping):
            raise ConfigError(key, value, f"choose one by its name, {key}=NAME, and set its keys with {key}.KEY=VALUE")
        return read(inner, value, prefix=f"{key}.")  # type: ignore[arg-type]
    single = metadata.get("one_or_more") and not isinstance(value, (list, tuple))
    try:
        return _cast([value] if single else value, inner, metadata["bounds"])
    except ValueError:
        expected = allowed(hint, metadata)
        problem = f"needs {expected}: {metadata['help']}" if value is None else f"expected {expected}"
        raise ConfigError(key, value, problem) from None


def _cast(value: object, hint: Any, bounds: Bounds) -> object:
    """`value` as `hint`; ValueError when it is not one. No text becomes a number, and true is not 1."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        for option in arguments:
            with contextlib.suppress(ValueError):
                return _cast(value, option, bounds)
    elif origin is typing.Literal:
        if value in arguments and isinstance(value, str):
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        if arguments[-1] is Ellipsis and value:
            return tuple(_cast(item, arguments[0], bounds) for item in value)
        if len(value) == len(arguments):
            return tuple(_cast(item, argument, bounds) for item, argument in zip(value, arguments, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    elif hint is bool and isinstance(value, bool):
        return value
    elif hint is str and isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
        return str(value)  # a folder may be called 2024
    elif hint in (int, float) and isinstance(value, (int, hint)) and not isinstance(value, bool):
        number = hint(value)
        if math.isfinite(number) and bounds.allow(number):
            return number
    raise ValueError(value)
