"""Command-line settings in Hydra's syntax: parsing them and expanding sweeps.

Hydra's own messages span several lines and advise to add `+`, which turns a misspelt key into one that nobody reads
(hydra#1912). Here a setting that does not fit is one line, and `+` is never the way out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from gpipe_cli.errors import ConfigError

PROSE_KEYS = ("prompt",)  # a sentence of the user's: commas and brackets in it mean nothing


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One `key=value` of the command line."""

    key: str
    prefix: str  # "", "+" or "++"
    text: str  # the value as typed
    value: object
    hydra_text: str  # the value as Hydra's grammar reads it


def parse_settings(words: Sequence[str], text_keys: Collection[str] = ()) -> list[Setting]:
    """Settings from `key=value` words; of a key that is given twice the last one counts, as in Hydra.

    The value of one of the `text_keys` is taken as it stands where Hydra's grammar cannot read it (`/data/josé (2)`).
    Raises ConfigError, one line, for a word that is not a single `key=value`.
    """
    settings = {}
    for word in words:
        override = _parse(word, text_keys)
        key, text = override.key_or_group, word.partition("=")[2]
        if override.is_sweep_override():
            problem = f"several values are a sweep: add -m; write a list as {key}=[…], quote a text that has commas"
            raise ConfigError(key, text, problem)
        prefix = "++" if override.is_force_add() else "+" if override.is_add() else ""
        hydra_text = str(override.input_line).partition("=")[2]
        settings[key] = Setting(key=key, prefix=prefix, text=text, value=override.value(), hydra_text=hydra_text)
    return list(settings.values())


def expand_sweep(words: Sequence[str], text_keys: Collection[str] = ()) -> list[list[str]]:
    """The words of every job of a sweep: the product of all lists, the last key varying fastest."""
    choices = []
    for word in words:
        override = _parse(word, text_keys)
        key = override.get_key_element()
        values = _sweep_values(override, word) if override.is_sweep_override() else []
        choices.append([f"{key}={value}" for value in values] or [word])
    return [list(job) for job in itertools.product(*choices)]


def _parse(word: str, text_keys: Collection[str]) -> Override:
    key, equals, text = word.partition("=")
    if word.startswith("~"):
        raise ConfigError(None, word, "a key cannot be removed; give it another value")
    if not equals or not key.strip("+"):
        raise ConfigError(None, word, "expected key=value")
    if key in PROSE_KEYS and text[:1] not in ("'", '"'):
        prose = text.replace("${", "\\${")  # else it names another setting
        word = f"{key}={QuotedString(text=prose, quote=Quote.single).with_quotes()}"
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(word)
    except HydraException:
        quoted = f"{key}={QuotedString(text=text, quote=Quote.single).with_quotes()}"
        if key not in text_keys or "\n" in text:
            raise ConfigError(
                None, word, f"cannot be read; text with special characters needs quotes: {quoted}"
            ) from None
        override = parser.parse_override(quoted)
    if override.key_or_group.replace("/", ".").split(".")[0] == "hydra":
        raise ConfigError(None, word, "gpipe takes no hydra settings; results_dir and run_dir name the output folders")
    if override.package is not None or "/" in override.key_or_group:
        raise ConfigError(None, word, "expected key=value with a key such as partitions or optimizer.lr")
    return override


def _sweep_values(override: Override, word: str) -> list[str]:
    try:
        values = list(override.sweep_string_iterator())
    except HydraException:  # interval() and glob() name no single values
        values = []
    if not values:
        raise ConfigError(None, word, "a sweep needs single values: key=1,2,4 or key=range(1,5)")
    return values
