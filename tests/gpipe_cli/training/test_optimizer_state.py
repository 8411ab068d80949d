"""Optimizer state by parameter name: training goes on bit for bit, also when the network is cut otherwise."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from gpipe_cli.config import OptimizerConfig
from gpipe_cli.errors import TrainingError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.checkpoints import optimizer_tensors, restore_optimizer
from gpipe_cli.training.optimizer import build_optimizer

OPTIMIZERS = {
    "rmsproptf": OptimizerConfig(name="rmsproptf", lr=0.1, weight_decay=1e-3, momentum=0.9, options={"eps": 1.0}),
    "sgd": OptimizerConfig(name="sgd", lr=0.1, weight_decay=1e-3, momentum=0.9),
    "plain sgd": OptimizerConfig(name="sgd", lr=0.1, weight_decay=1e-3, momentum=0.0),
    "adamw": OptimizerConfig(name="adamw", lr=0.01, weight_decay=1e-3),
    "lamb": OptimizerConfig(name="lamb", lr=0.01, weight_decay=1e-3),
    "adan": OptimizerConfig(name="adan", lr=0.01, weight_decay=1e-3),
    "novograd": OptimizerConfig(name="novograd", lr=0.01, weight_decay=1e-3),
}


class Training:
    """A network as a list of stages, each with its own optimizer, as ranks have them."""

    def __init__(self, config: OptimizerConfig, cuts: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)]
        self.network = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        names = {parameter: name for name, parameter in self.network.named_parameters()}
        bounds = [0, *cuts, len(layers)]
        self.stages = []
        for begin, end in pairwise(bounds):
            own = [(names[p], p) for layer in self.network[begin:end] for p in layer.parameters()]
            self.stages.append((build_optimizer(own, config), {p: name for name, p in own}))

    def train(self, steps: range) -> None:
        for step in steps:
            images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(step))
            self.network(images).square().mean().backward()
            for optimizer, _ in self.stages:
                optimizer.step()
                optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        state = dict(self.network.state_dict())
        for optimizer, names in self.stages:
            state.update(optimizer_tensors(optimizer, names))
        return {key: value.clone() for key, value in state.items()}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self.network.load_state_dict({key: tensors[key] for key in self.network.state_dict()})
        for optimizer, names in self.stages:
            restore_optimizer(optimizer, names, tensors)


@pytest.mark.parametrize("cuts", [(), (1, 3), (2, 3)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_training_equals_uninterrupted_training(name: str, cuts: tuple[int, ...], tmp_path) -> None:
    config = OPTIMIZERS[name]
    whole = Training(config, cuts=(2,))
    whole.train(range(4))
    path = checkpoints.save(tmp_path, 4, whole.tensors(), {}, keep=1)
    whole.train(range(4, 8))

    resumed = Training(config, cuts)
    resumed.restore(checkpoints.load(path))
    resumed.train(range(4, 8))
    expected = whole.tensors()
    found = resumed.tensors()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_numbers_come_back_with_their_type() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state = {"calls": 3, "scale": 0.1, "warm": True, "buffer": None, "sums": torch.ones(2, 2, dtype=torch.float64)}
    optimizer.state[parameter] = dict(state)
    tensors = optimizer_tensors(optimizer, {parameter: "layer.weight"})
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    assert "optimizer/layer.weight/sums" in tensors
    other = torch.optim.SGD([parameter], lr=0.1)
    restore_optimizer(other, {parameter: "layer.weight"}, tensors)
    restored = other.state[parameter]
    assert {key: type(value) for key, value in restored.items()} == {key: type(value) for key, value in state.items()}
    assert (restored["calls"], restored["scale"], restored["warm"], restored["buffer"]) == (3, 0.1, True, None)
    assert torch.equal(restored["sums"], state["sums"])


def test_state_does_not_share_memory_with_what_it_was_restored_from() -> None:
    training = Training(OPTIMIZERS["adamw"], ())
    training.train(range(2))
    tensors = training.tensors()
    kept = {key: value.clone() for key, value in tensors.items()}
    training.restore(tensors)
    training.train(range(2, 4))
    assert all(torch.equal(tensors[key], kept[key]) for key in kept)


def test_parameter_without_state_stays_without() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    restore_optimizer(optimizer, {parameter: "layer.weight"}, {"optimizer/other.weight/momentum_buffer": torch.ones(2)})
    assert not optimizer.state_dict()["state"]


def test_state_that_no_checkpoint_can_hold_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["factors"] = [torch.zeros(1)]
    with pytest.raises(TrainingError, match=r"SGD keeps 'factors' of layer.weight as list"):
        optimizer_tensors(optimizer, {parameter: "layer.weight"})
