"""The moving average of the weights: its arithmetic, the exact swap, and its independence of the engine's hooks."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from gpipe_cli.errors import TrainingError
from gpipe_cli.training.ema import WeightAverage


def network() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "pool": nn.MaxPool2d(2)})


def change(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator))
            else:
                tensor.add_(1)


def copy_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("warmup", [True, False])
def test_average_follows_weights_and_running_statistics(warmup: bool) -> None:
    module = network()
    average = WeightAverage(module, 0.9, warmup=warmup)
    expected = copy_of(module)
    for step in range(1, 100):
        change(module, step)
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step)) if warmup else 0.9
        for name, tensor in module.state_dict().items():
            floating = tensor.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * tensor if floating else tensor.clone()
        assert set(average.state_dict()) == {f"ema/{name}" for name in expected}
        for name, tensor in expected.items():
            torch.testing.assert_close(average.state_dict()[f"ema/{name}"], tensor)


def test_swap_evaluates_the_average_and_restores_every_bit() -> None:
    module = network()
    average = WeightAverage(module, 0.5)
    for step in (1, 2, 3):
        change(module, step)
        average.update(step)
    before, averaged = copy_of(module), {name: tensor.clone() for name, tensor in average.state_dict().items()}
    parameters = list(module.parameters())
    with average.swapped():
        assert all(torch.equal(tensor, averaged[f"ema/{name}"]) for name, tensor in module.state_dict().items())
    with pytest.raises(RuntimeError, match="evaluation fails"), average.swapped():
        raise RuntimeError("evaluation fails")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in average.state_dict().items())
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))


def test_hooks_of_the_engine_are_not_copied() -> None:
    class Engine:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # cannot be copied
            self.calls = 0

        def hook(self, *_: object) -> None:
            self.calls += 1

    engine, module = Engine(), network()
    module["norm"].register_forward_pre_hook(engine.hook)
    module["norm"].register_forward_hook(engine.hook)
    average = WeightAverage(module, 0.9)
    average.update(1)
    with average.swapped():
        module["norm"](torch.zeros(2, 2, 2, 2))
    assert engine.calls == 2


def test_replaced_buffers_are_followed() -> None:
    module = network()
    average = WeightAverage(module, 0.5, warmup=False)
    module["norm"].running_mean = torch.full((2,), 4.0)
    average.update(1)
    assert average.state_dict()["ema/norm.running_mean"].tolist() == [2.0, 2.0]


def test_tied_weights_move_once() -> None:
    module = nn.ModuleDict({"first": nn.Linear(2, 2, bias=False), "last": nn.Linear(2, 2, bias=False)})
    module["last"].weight = module["first"].weight
    start = module["first"].weight.detach().clone()
    average = WeightAverage(module, 0.5, warmup=False)
    with torch.no_grad():
        module["first"].weight.add_(1)
    average.update(1)
    torch.testing.assert_close(average.state_dict()["ema/first.weight"], start + 0.5)


@pytest.mark.parametrize("layer", [nn.MaxPool2d(2), nn.BatchNorm2d(2, affine=False)])
def test_stage_without_parameters_can_be_averaged(layer: nn.Module) -> None:
    module = nn.ModuleDict({"only": layer})
    average = WeightAverage(module, 0.5)
    change(module, 1)
    average.update(1)
    with average.swapped():
        pass
    assert set(average.state_dict()) == {f"ema/{name}" for name in module.state_dict()}


def test_average_goes_on_from_its_saved_state() -> None:
    module = network()
    average = WeightAverage(module, 0.9)
    change(module, 1)
    average.update(1)
    saved = {name: tensor.clone() for name, tensor in average.state_dict().items()} | {"other": torch.zeros(1)}
    resumed = WeightAverage(module, 0.9)
    resumed.load_state_dict(saved)
    change(module, 2)
    average.update(2)
    resumed.update(2)
    for name, tensor in average.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
    with pytest.raises(TrainingError, match=r"lacks 1 averaged tensors, among them ema/conv.bias"):
        resumed.load_state_dict({name: tensor for name, tensor in saved.items() if name != "ema/conv.bias"})
