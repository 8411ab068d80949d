"""Bytes a parameter: the table agrees with the optimizers themselves."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.config import OptimizerConfig
from gpipe_cli.training import optimizer_memory
from gpipe_cli.training.optimizer import build_optimizer
from gpipe_cli.training.optimizer_memory import bytes_per_parameter, num_kept_values


def config(name: str, momentum: float = 0.9, **options) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=0.1, weight_decay=0.0, momentum=momentum, options=options)


@pytest.mark.parametrize(("name", "momentum", "expected"), [
    ("sgd", 0.0, 8), ("sgd", 0.9, 12), ("rmsproptf", 0.0, 12), ("rmsproptf", 0.9, 16), ("adamw", 0.0, 16),
])  # fmt: skip
def test_weight_gradient_and_what_the_optimizer_keeps(name, momentum, expected):
    assert bytes_per_parameter(config(name, momentum)) == expected


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", sorted(optimizer_memory._KNOWN))
def test_the_table_says_what_the_optimizer_keeps(name, momentum):
    parameter = torch.nn.Parameter(torch.ones(8, 8))
    built = build_optimizer([("weight", parameter)], config(name, momentum))
    parameter.grad = torch.ones_like(parameter)
    built.step()
    kept = [v for v in built.state[parameter].values() if torch.is_tensor(v) and v.shape == parameter.shape]
    assert num_kept_values(config(name, momentum)) == len(kept)


def test_an_optimizer_outside_the_table_shows_what_it_keeps():
    assert num_kept_values(config("adamw", amsgrad=True)) == 3
    assert num_kept_values(config("adagrad", 0.0)) == 1
