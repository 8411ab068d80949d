"""The two halves of a backward pass: together they are the whole one, and the first one does not do the second's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.deferral import Deferral, Products
from gpipe_cli.pipeline.memory import ActivationMeter


class Keywords(nn.Module):
    """Names its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(weight=self.weight, input=input)


class Shared(nn.Module):
    """Uses one weight twice, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, input: Tensor) -> Tensor:
        hidden = nn.functional.linear(input, self.weight).tanh()
        return nn.functional.linear(hidden, self.weight.t())


LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (7, 6)),
    "linear of a vector": (lambda: nn.Linear(6, 5), (6,)),
    "linear of sequences, no bias": (lambda: nn.Linear(6, 5, bias=False), (3, 4, 6)),
    "linear of sequences": (lambda: nn.Linear(6, 5), (3, 4, 6)),
    "convolution": (lambda: nn.Conv2d(6, 4, 3), (3, 6, 9, 8)),
    "convolution of one picture": (lambda: nn.Conv2d(6, 4, 3), (6, 9, 8)),
    "strided groups": (lambda: nn.Conv2d(6, 4, (3, 1), stride=2, padding=(1, 0), groups=2, bias=False), (3, 6, 9, 8)),
    "dilated, padding by name": (lambda: nn.Conv2d(6, 4, 3, padding="same", dilation=2), (3, 6, 9, 8)),
    "one axis": (lambda: nn.Conv1d(6, 4, 3, stride=2, padding=1), (3, 6, 9)),
    "three axes": (lambda: nn.Conv3d(6, 4, 2), (2, 6, 3, 4, 5)),
    "weight used twice": (Shared, (3, 6)),
    "arguments by name": (Keywords, (3, 6)),
    "with batch norm": (lambda: nn.Sequential(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), (3, 6, 4, 4)),
}


def gradients_of(module: nn.Module, input: Tensor) -> dict[str, Tensor | None]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"input": input.grad, **found}


@pytest.mark.parametrize("kind", LAYERS)
def test_both_halves_together_are_the_backward_pass(kind):
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    module = build().double()
    whole, halves = (torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(2))
    halves.data.copy_(whole.data)
    (module(whole).sin().sum()).backward()
    expected = gradients_of(module, whole)
    module.zero_grad()

    deferral = Deferral()
    with deferral:
        loss = module(halves).sin().sum()
    loss.backward()
    deferral.run()
    found = gradients_of(module, halves)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: name + text
        )


def test_the_first_half_leaves_the_weights_alone_and_the_second_half_adds_to_them():
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Flatten(), nn.Linear(12, 2))
    deferral = Deferral()
    for times in (1, 2):
        input = torch.ones(1, 2, 2, 2, requires_grad=True)
        with deferral:
            module(input).sum().backward()
        assert input.grad is not None
        assert (module[2].weight.grad is None) == (times == 1)
        deferral.run()
        assert module[2].bias.grad.tolist() == [times, times]
    module.zero_grad()
    deferral.run()
    assert module[2].weight.grad is None  # nothing waits any more


def test_what_is_not_trained_gets_no_gradient():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].requires_grad_(False)
    module[1].bias.requires_grad_(False)
    deferral, input = Deferral(), torch.ones(2, 3, requires_grad=True)
    with deferral:
        module(input).sum().backward()
    deferral.run()
    assert [parameter.grad is not None for parameter in module.parameters()] == [False, False, True, False]
    assert input.grad is not None


def test_forgotten_gradients_are_gone():
    module, deferral = nn.Linear(3, 3), Deferral()
    with deferral:
        module(torch.ones(2, 3, requires_grad=True)).sum().backward()
    deferral.discard()
    deferral.run()
    assert module.weight.grad is None


def test_the_halves_work_in_mixed_precision_as_the_whole():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4))
    found = []
    for deferral in (None, Deferral()):
        module.zero_grad()
        input = torch.linspace(-1, 1, 2 * 8 * 16).view(2, 8, 4, 4).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if deferral is None:
                output = module(input)
            else:
                with deferral:
                    output = module(input)
        assert output.dtype is torch.bfloat16
        output.float().square().sum().backward()
        if deferral is not None:
            deferral.run()
        found.append([input.grad, *(parameter.grad for parameter in module.parameters())])
    for whole, halves in zip(*found, strict=True):
        assert halves.dtype is torch.float32
        torch.testing.assert_close(halves, whole, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", LAYERS)
def test_what_would_wait_is_told_without_running_it(kind):
    build, shape = LAYERS[kind]
    module, deferral, products = build(), Deferral(), Products()
    with products:
        module(torch.ones(shape, requires_grad=True))
    with deferral, ActivationMeter(module.parameters()) as meter:
        module(torch.ones(shape, requires_grad=True)).sum().backward()
        held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in products.inputs}
        told = sum(held.values()) + sum(tensor.nbytes for tensor in products.outputs)
        # sum()'s gradient is one number for all: that of the last product takes four bytes.
        last = products.outputs[-1].nbytes if products.outputs else 0
        assert told - last <= meter.live_bytes <= told
    assert bool(products.outputs) == (kind not in ("dilated, padding by name", "convolution of one picture"))


def test_what_waits_counts_as_held():
    module, deferral = nn.Linear(100, 50), Deferral()
    with ActivationMeter(module.parameters()) as meter:
        with deferral:
            output = module(torch.ones(10, 100, requires_grad=True) * 1)
        output.backward(torch.ones(10, 50))
        del output
        assert meter.live_bytes == (10 * 100 + 10 * 50) * 4
        deferral.run()
        assert meter.live_bytes == 0
