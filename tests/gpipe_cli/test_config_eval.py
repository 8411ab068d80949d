"""The settings of `gpipe eval`, and what they may change of the run's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpipe_cli.compose import load
from gpipe_cli.config_eval import EvalConfig, run_settings
from gpipe_cli.errors import ConfigError

TRAINED = ("dataset=folder", "dataset.path=old", "partitions=4", "balance=[1,1,1,3]", "batch_size=32", "seed=3")


def stored(*words: str) -> dict[str, Any]:
    return dataclasses.asdict(load("train", [*TRAINED, *words]))


def own(*words: str) -> EvalConfig:
    config: EvalConfig = load("eval", words)
    return config


def test_what_is_not_given_is_the_runs() -> None:
    config = run_settings(stored("precision=bf16", "eval_batch_size=8", "workers=2"), own(), "auto")
    assert (config.partitions, config.balance, config.seed) == (4, (1, 1, 1, 3), 3)
    assert (config.precision, config.eval_batch_size, config.workers) == ("bf16", 8, 2)
    assert (config.command, config.dataset.path) == ("eval", "old")


def test_what_is_given_wins_and_another_cut_drops_the_balance() -> None:
    words = ("partitions=2", "batch_size=7", "precision=fp32", "dataset.path=new", "dataset.eval_split=test")
    config = run_settings(stored("precision=bf16"), own(*words), "auto")
    assert (config.partitions, config.balance, config.eval_batch_size) == (2, None, 7)
    assert (config.precision, config.dataset.path, config.dataset.eval_split) == ("fp32", "new", "test")


def test_settings_of_other_commands_are_passed_over() -> None:
    assert run_settings({**stored(), "freeze": True}, own(), "auto").partitions == 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("dataset.pth=new",), "dataset.pth=new: unknown key; did you mean path?"),
        (("dataset.name=digits",), "dataset.name=digits: the checkpoint says it; leave it out, or train anew"),
        (("balance=[2,2]",), "balance=[2,2]: names 2 partitions but partitions=4; give one number of layers for each"),
        (("micro_batches=33",), "micro_batches=33: there are only batch_size=32 samples to split"),
        (("ranks=5",), "ranks=5: there is work for partitions=4 ranks only"),
        (("dataset.path=[1]",), "dataset.path=[1]: expected text, or null"),
    ],
)
def test_what_cannot_be_changed_is_one_line(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_settings(stored(), own(*words), "auto")
    assert str(caught.value).startswith(line)


def test_settings_that_this_version_does_not_know_are_the_checkpoints_fault() -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint=old-run: its settings are not those of this version.*seed"):
        run_settings({**stored(), "seed": None}, own(), "old-run")


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ((), "eval"),
        (("export=a.safetensors",), None),
        (("export=a.safetensors", "split=train"), "train"),
        (("prompt=Once",), None),
        (("prompt=Once", "split=eval"), "eval"),
        (("export=a.safetensors", "split=none"), None),
    ],
)
def test_an_export_or_a_prompt_evaluates_only_what_is_named(words: tuple[str, ...], split: str | None) -> None:
    assert own(*words).evaluated_split == split


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("model=amoebanet", "model=amoebanet: is the run's, and the checkpoint brings it; leave it out"),
        ("model.layers=3", "model.layers=3: is the run's, and the checkpoint brings it; leave it out"),
        ("optimizer.lr=1", "optimizer.lr=1: is the run's, and the checkpoint brings it; leave it out"),
        ("dataset=cifar10", "dataset=cifar10: takes its settings one by one, dataset.KEY=VALUE"),
        ("chekpoint=run", "chekpoint=run: unknown key; did you mean checkpoint?"),
        ("export=model.pt", "export=model.pt: the file is written in the safetensors format; give it a name that"),
        ("split=none", "split=none: leaves nothing to do; use split=eval or train, or add export=FILE"),
        ("num_tokens=9", "num_tokens=9: is for prompt=TEXT; add a prompt, or leave it out"),
        ("temperature=-1", "temperature=-1: expected a number, 0 or more"),
        ("prompt=", "prompt=: expected text, or null"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(word: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own(word)
    assert str(caught.value).startswith(line)


def test_results_of_nothing_have_no_folder() -> None:
    with pytest.raises(ConfigError, match=r"^run_dir=x: holds the results of an evaluation; add split=eval"):
        own("export=a.safetensors", "run_dir=x")


@pytest.mark.parametrize(
    "prompt",
    ["Once upon a time, there (was) [a] {king}", 'it\'s "so"', "price: $5 = ${x}", "two\nlines", "null", "3", "a\\"],
)
def test_a_prompt_is_taken_as_it_stands(prompt: str) -> None:
    assert own(f"prompt={prompt}").prompt == prompt
