"""Frozen layers: what they compute and hold stays as it is, and they go on as before when they are released."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline import Pipeline
from gpipe_cli.training.freezing import Frozen


def network() -> nn.Sequential:
    body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 1))
    body[3].weight.requires_grad_(False)  # by its author
    return nn.Sequential(body, nn.Flatten(), nn.Linear(16, 2))


def step(pipe: Pipeline) -> None:
    pipe.module.zero_grad()
    generator = torch.Generator().manual_seed(pipe.step)
    pipe.forward_backward(torch.randn(4, 3, 2, 2, generator=generator), torch.tensor([0, 1, 1, 0]))


def body_of(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.state_dict().items() if name.startswith("0.")}


def test_nothing_of_a_frozen_layer_moves_until_it_is_released() -> None:
    pipe = Pipeline(network(), 2, 2, loss_fn=nn.functional.cross_entropy, balance=[1, 2])
    before = body_of(pipe)
    frozen = Frozen([pipe.module.get_submodule("0")], num_steps=3, run_steps=7)
    for number in range(3):
        frozen.set_progress(number / 7)
        step(pipe)
        assert all(parameter.grad is None for name, parameter in pipe.named_parameters() if name.startswith("0."))
        assert all(parameter.grad is not None for name, parameter in pipe.named_parameters() if name.startswith("2."))
    assert all(torch.equal(tensor, before[name]) for name, tensor in body_of(pipe).items())

    frozen.set_progress(3 / 7)
    step(pipe)
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert gradients["0.0.weight"] is not None
    assert gradients["0.3.weight"] is None
    after = body_of(pipe)
    assert not torch.equal(after["0.1.running_mean"], before["0.1.running_mean"])
    assert int(after["0.1.num_batches_tracked"]) == 1
    assert all(module.training for module in pipe.module.modules())


def test_evaluation_leaves_a_frozen_layer_frozen() -> None:
    pipe = Pipeline(network(), loss_fn=nn.functional.cross_entropy)
    frozen = Frozen([pipe.module.get_submodule("0")])
    before = body_of(pipe)
    pipe.evaluate(torch.randn(2, 3, 2, 2))
    frozen.set_progress(0.9)
    step(pipe)
    assert all(torch.equal(tensor, before[name]) for name, tensor in body_of(pipe).items())
