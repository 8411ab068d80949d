"""The input that a plan is for, and networks that cannot be counted."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.compose import load
from gpipe_cli.errors import ConfigError
from gpipe_cli.planning.network import make_planner, sample_of

USERS = """
from torch import nn

class Reads(nn.Module):
    def forward(self, x):
        return x * float(x.sum())

def fine(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, num_classes))

def reads_values():
    return nn.Sequential(nn.Flatten(), Reads())
"""


def test_pictures_have_the_size_that_is_set(plan_config):
    sample = sample_of(plan_config("image_size=24"), 2, torch.device("cpu"))
    assert sample.shape == (2, 3, 24, 24)
    assert sample.is_contiguous(memory_format=torch.channels_last)
    assert sample_of(plan_config(), 1, torch.device("meta")).device.type == "meta"


def test_a_users_network_is_planned_and_one_that_reads_values_is_refused(plan_config, tmp_path, monkeypatch):
    (tmp_path / "users_planned_network.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    module = "model.factory=users_planned_network"
    config = plan_config()
    model = {"name": "module", "factory": "users_planned_network:fine"}
    import dataclasses

    planner = make_planner(dataclasses.replace(config, model=dataclasses.replace(config.model, **model)))
    assert planner.network.names == ("0", "1")
    model["factory"] = "users_planned_network:reads_values"
    with pytest.raises(ConfigError, match=f"{module}:reads_values: the layers cannot run on tensors without data"):
        make_planner(dataclasses.replace(config, model=dataclasses.replace(config.model, **model)))


def test_a_network_for_text_sees_tokens():
    config = load("plan", ["model=transformer", "model.seq_len=20", "hardware=p40"])
    sample = sample_of(config, 2, torch.device("cpu"))
    assert (sample.shape, sample.dtype) == ((2, 20), torch.int64)
    planner = make_planner(config)
    # The loss keeps no more than the logits, which are the last layer's output, and a number a token.
    assert planner.network.loss.saved_inputs == (True,)
    assert planner.network.loss.saved_inside.per_sample == 20 * (4 + 8)
