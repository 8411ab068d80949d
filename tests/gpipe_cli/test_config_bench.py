"""The settings of `gpipe bench`."""

from __future__ import annotations

import ast
from importlib import resources
from pathlib import Path

import pytest
import yaml

import gpipe_cli
from gpipe_cli.catalogue import CONFIG_PACKAGE, group_choices, typed_keys
from gpipe_cli.compose import load
from gpipe_cli.config_bench import BenchConfig
from gpipe_cli.errors import ConfigError


def test_one_value_is_a_list_of_one() -> None:
    config = load("bench", ["partitions=2", "remat=[full,none]", "baseline=single"])
    assert (config.partitions, config.remat, config.baseline) == ((2,), ("full", "none"), ("single",))
    assert load("bench", ["baseline=null"]).baseline is None


@pytest.mark.parametrize("suite", group_choices("bench")["suite"])
def test_every_suite_composes(suite: str) -> None:
    config = load("bench", [f"suite={suite}"])
    assert (config.suite, config.baseline) == (suite, None)
    assert (config.model.layers, config.model.filters) == (18, 256)


def test_every_knob_is_in_the_root_file_or_a_group_and_nothing_else() -> None:
    root = yaml.safe_load((resources.files(CONFIG_PACKAGE) / "bench.yaml").read_text(encoding="utf-8"))
    top = {key for key, _, _ in typed_keys(BenchConfig) if "." not in key} - {"suite"}
    assert top == set(root) - {"defaults", "optimizer"}


def test_every_knob_is_read_by_the_bench() -> None:
    source = Path(gpipe_cli.__file__).parent
    files = [*source.glob("benchmark/*.py"), source / "commands" / "bench.py"]
    read = {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert {key for key, _, _ in typed_keys(BenchConfig) if "." not in key} <= read


def test_a_setting_of_training_is_not_one_of_the_bench() -> None:
    with pytest.raises(ConfigError, match="epochs=3: unknown key"):
        load("bench", ["epochs=3"])
