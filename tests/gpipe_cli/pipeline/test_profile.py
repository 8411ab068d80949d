"""Layer costs, counted and measured."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline import cut
from gpipe_cli.pipeline.profile import count_costs, measure_layers


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 10))


def test_counted_operations_and_bytes_are_those_on_paper():
    conv, norm, flat, linear = count_costs(network(), torch.empty(2, 3, 8, 8))
    assert conv.num_flops == 2 * 2 * 8 * 8 * 8 * 3 * 9
    assert linear.num_flops == 2 * 2 * 512 * 10
    assert conv.num_bytes_moved == 4 * (2 * 3 * 64 + 8 * 27 + 2 * 8 * 64)
    assert norm.num_bytes_moved >= 4 * 2 * (2 * 8 * 64)
    assert flat.num_bytes_moved == 0
    assert [c.num_operations for c in (conv, norm, flat)] == [1, 2, 0]
    assert [c.num_parameters for c in (conv, norm, flat, linear)] == [216, 16, 0, 5130]
    assert [c.num_bytes_out for c in (conv, linear)] == [4 * 1024, 80]


def test_costing_a_network_that_fits_nowhere_takes_no_memory():
    layers = [(f"layer{i}", lambda: nn.Linear(200_000, 200_000, bias=False)) for i in range(4)]
    costs = count_costs(layers, torch.empty(8, 200_000, device="meta"))
    assert sum(c.num_parameters for c in costs) == 160_000_000_000
    assert costs[0].num_flops == 2 * 8 * 200_000**2


def test_many_small_operations_cost_more_than_one():
    one, many = count_costs(nn.Sequential(nn.ReLU(), nn.Sequential(*[nn.ReLU()] * 9)), torch.empty(1, 1))
    assert many.work == 9 * one.work > 9 * 500_000


class Busy(nn.Module):
    """Costs what it is told, by the clock."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.seconds = milliseconds / 1000
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return x * self.weight


def test_a_cut_by_measured_times_is_not_fooled_by_order_or_start_up():
    layers = nn.Sequential(*[Busy(ms) for ms in (18, 15, 12, 9, 6, 3)])
    assert cut(measure_layers(layers, torch.ones(2, 1), torch.device("cpu")), 2) == (2, 4)


def test_a_long_network_is_measured_layer_by_layer():
    layers = nn.Sequential(*[Busy(5 if index % 6 == 0 else 1) for index in range(19)])
    seconds = measure_layers(layers, torch.ones(2, 1), torch.device("cpu"), num_repeats=3)
    assert [index for index, layer_s in enumerate(seconds) if layer_s > 0.003] == [0, 6, 12, 18]


class _SlowGradient(torch.autograd.Function):
    """The identity; the gradient of the input takes 10 ms."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.needs_input_grad[0]:
            end = time.perf_counter() + 0.01
            while time.perf_counter() < end:
                pass
        return gradient if ctx.needs_input_grad[0] else None, gradient.sum()


class SlowGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SlowGradient.apply(x, self.weight)


def test_the_gradient_of_the_networks_input_is_not_measured_as_training_does_not_compute_it():
    first, second = measure_layers(nn.Sequential(SlowGradient(), SlowGradient()), torch.ones(2, 1), torch.device("cpu"))
    assert first < 0.005 < 0.01 <= second


@pytest.mark.parametrize("method", ["count", "measure"])
def test_profiling_leaves_no_trace(method):
    model = nn.Sequential(*network(), nn.ReLU(inplace=True), nn.Dropout(0.5))
    model[1].eval()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    sample = torch.randn(2, 3, 8, 8)
    before = ({k: v.clone() for k, v in model.state_dict().items()}, [p.grad.clone() for p in model.parameters()],
              [m.training for m in model.modules()], torch.get_rng_state(), sample.clone())  # fmt: skip
    if method == "count":
        count_costs(model, sample)
    else:
        measure_layers(model, sample, torch.device("cpu"), num_repeats=1)
    assert all(torch.equal(v, before[0][k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before[1], strict=True))
    assert [m.training for m in model.modules()] == before[2]
    assert torch.equal(torch.get_rng_state(), before[3])
    assert torch.equal(sample, before[4])
