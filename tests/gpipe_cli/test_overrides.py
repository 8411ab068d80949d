"""Words of the command line become settings or one line, and sweeps become jobs."""

from __future__ import annotations

import pytest

from gpipe_cli.errors import ConfigError
from gpipe_cli.overrides import expand_sweep, parse_settings


def values(*words: str, text_keys: tuple[str, ...] = ()) -> dict[str, object]:
    return {setting.key: setting.value for setting in parse_settings(words, text_keys)}


def test_values_have_the_types_of_hydras_grammar() -> None:
    parsed = values("a=1", "b=1e-3", "c=true", "d=null", "e=[3,2]", "f=x y", "g='1'", "h={k:1}")
    assert parsed == {"a": 1, "b": 0.001, "c": True, "d": None, "e": [3, 2], "f": "x y", "g": "1", "h": {"k": 1}}


def test_the_last_of_two_settings_of_one_key_counts() -> None:
    assert values("a=1", "b=2", "a=3") == {"a": 3, "b": 2}


@pytest.mark.parametrize("path", ["/data/josé (2)/a=b", "it's", "[1", "c:\\x"])
def test_text_that_hydra_cannot_read_is_taken_as_it_stands_for_a_text_key(path: str) -> None:
    assert values(f"run_dir={path}", text_keys=("run_dir",)) == {"run_dir": path}


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("partitions", "partitions: expected key=value"),
        ("=4", "=4: expected key=value"),
        ("~partitions", "~partitions: a key cannot be removed; give it another value"),
        ("~partitions=4", "~partitions=4: a key cannot be removed; give it another value"),
        ("a=[1,2", "a=[1,2: cannot be read; text with special characters needs quotes: a='[1,2'"),
        ("a='b", "a='b: cannot be read; text with special characters needs quotes: a='\\'b'"),
        ("a=b=c", "a=b=c: cannot be read; text with special characters needs quotes: a='b=c'"),
        ("hydra.x=1", "hydra.x=1: gpipe takes no hydra settings; results_dir and run_dir name the output folders"),
        ("+hydra.x=1", "+hydra.x=1: gpipe takes no hydra settings; results_dir and run_dir name the output folders"),
        ("hydra/a=1", "hydra/a=1: gpipe takes no hydra settings; results_dir and run_dir name the output folders"),
        ("a@b=c", "a@b=c: expected key=value with a key such as partitions or optimizer.lr"),
        ("a/b=c", "a/b=c: expected key=value with a key such as partitions or optimizer.lr"),
        ("a=1,2", "a=1,2: several values are a sweep: add -m; write a list as a=[…], quote a text that has commas"),
    ],
)
def test_a_word_that_is_no_single_setting_is_refused_in_one_line(word: str, line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_settings([word])
    assert str(refusal.value) == line


def test_a_sweep_is_the_product_of_its_lists_with_the_last_key_fastest() -> None:
    jobs = expand_sweep(["a=1,2", "b=x", "c=range(3,5)"])
    assert jobs == [["a=1", "b=x", "c=3"], ["a=1", "b=x", "c=4"], ["a=2", "b=x", "c=3"], ["a=2", "b=x", "c=4"]]


def test_a_list_is_one_value_of_a_sweep() -> None:
    assert expand_sweep(["balance=[1,2],[2,1]"]) == [["balance=[1,2]"], ["balance=[2,1]"]]


@pytest.mark.parametrize("word", ["a=interval(0,1)", "a=glob(*)", "a=range(4,1)"])
def test_a_sweep_without_single_values_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"a sweep needs single values: key=1,2,4 or key=range\(1,5\)"):
        expand_sweep([word])
