"""The typed configuration: types at the boundary, and what it becomes in config.yaml."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from gpipe_cli.compose import compose, load
from gpipe_cli.config import TrainConfig, from_hydra
from gpipe_cli.errors import ConfigError
from gpipe_cli.fields import read
from gpipe_cli.pipeline import POLICIES


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("partitions=4.5", "partitions=4.5: expected a whole number, 1 or more"),
        ("partitions=true", "partitions=true: expected a whole number, 1 or more"),
        ("partitions='4'", "partitions='4': expected a whole number, 1 or more"),
        ("partitions=", "partitions=: expected a whole number, 1 or more"),
        ("partitions=0", "partitions=0: expected a whole number, 1 or more"),
        ("optimizer.lr=abc", "optimizer.lr=abc: expected a number, 0 or more"),
        ("optimizer.lr=-1", "optimizer.lr=-1: expected a number, 0 or more"),
        ("optimizer.lr=nan", "optimizer.lr=nan: expected a number, 0 or more"),
        ("epochs=-1", "epochs=-1: expected a whole number, 0 or more"),
        ("steps=-1", "steps=-1: expected a whole number, 1 or more, or null"),
        ("precision=fp16", "precision=fp16: expected one of fp32, bf16"),
        ("device=gpu", "device=gpu: expected one of auto, cpu, cuda"),
        ("remat=all", "remat=all: expected one of full, except_last, none, auto"),
        ("schedule=zb", "schedule=zb: expected one of gpipe, 1f1b, eager_1f1b, zero_bubble, interleaved"),
        ("clip_grad_norm=0", "clip_grad_norm=0: expected a number, more than 0, or null"),
        ("label_smoothing=1", "label_smoothing=1: expected a number, 0 or more and less than 1"),
        ("ema_decay=1", "ema_decay=1: expected a number, 0 or more and less than 1"),
        ("model.variant=C", "model.variant=C: expected one of B, D"),
        ("model.layers=1", "model.layers=1: expected a whole number, 2 or more"),
        ("threads=0", "threads=0: expected a whole number, 1 or more, or null"),
        ("balance=[2,0]", "balance=[2,0]: expected a list such as [3,2] of whole numbers, 1 or more, or null"),
        ("dataset.mean=[0.5]", "dataset.mean=[0.5]: expected a list of 3 numbers"),
        ("run_dir=", "run_dir=: expected text, or null"),
    ],
)
def test_a_value_of_the_wrong_type_or_size_is_refused_in_one_line(word: str, line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load("train", [word])
    assert str(refusal.value) == line


def test_numbers_keep_their_type() -> None:
    config = load(
        "train", ["optimizer.lr=1e30", "optimizer.weight_decay=0", "clip_grad_norm=5", "lr_schedule.warmup_epochs=2"]
    )
    taken = (
        config.optimizer.lr,
        config.optimizer.weight_decay,
        config.clip_grad_norm,
        config.lr_schedule.warmup_epochs,
    )
    assert taken == (1e30, 0.0, 5.0, 2.0)
    assert {type(value) for value in taken} == {float}


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("train", []).partitions = 2  # type: ignore[misc]


def test_a_hydra_config_and_a_plain_mapping_give_the_same() -> None:
    from omegaconf import OmegaConf

    plain = compose("train", [])
    assert from_hydra("train", OmegaConf.create(plain)) == from_hydra("train", plain) == load("train", [])


def test_config_yaml_holds_all_that_is_needed_to_read_it_back() -> None:
    config = load("train", ["dataset=folder", "dataset.path=photos", "balance=[2,3]", "partitions=2"])
    plain = yaml.safe_load(yaml.safe_dump(_lists(dataclasses.asdict(config))))
    assert read(TrainConfig, plain) == config


def _lists(value: object) -> object:
    """YAML's safe form knows no tuple."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_every_setting_says_what_it_means() -> None:
    from gpipe_cli.catalogue import typed_keys

    assert all(len(field.metadata["help"]) > 5 for _, field, _ in typed_keys())


@pytest.mark.parametrize("command", ["train", "bench", "plan"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_schedule_can_be_chosen_in_every_command_that_has_one(command: str, policy: str) -> None:
    config = load(command, [f"schedule={policy}", "partitions=4", "ranks=2", "micro_batches=4"])
    assert config.schedule in (policy, (policy,))  # bench takes several
