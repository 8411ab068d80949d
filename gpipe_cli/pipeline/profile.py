"""What every layer costs: counted on the meta device without computing anything, or measured on the device.

Counting runs the layers on meta tensors, so a network of any size is costed in no memory. Floating-point operations
follow torch.utils.flop_counter; bytes are those of every operation's inputs and outputs, which is what bounds layers
such as batch normalisation and pools; how many operations they start rules small layers. Measuring leaves no trace: it
works on copies of what it could change.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from .layers import Layers, named_layers
from .microbatch import Value, flatten, unflatten
from .randomness import preserved_generators
from .recording import does_work

# What one core of a current server CPU computes (about 97 GFLOP/s) while it moves a byte (8 GB/s, its neighbour busy
# too) and while it starts an operation (6.7 us). Only ratios between layers matter for the cut.
FLOPS_PER_BYTE = 12.0
FLOPS_PER_OPERATION = 650e3

NUM_TOGETHER = 8  # consecutive layers that are timed together

T = TypeVar("T")


@dataclass(frozen=True)
class LayerCost:
    """Costs of a layer's forward pass on one micro-batch."""

    name: str
    num_parameters: int
    num_flops: int
    num_bytes_moved: int
    num_operations: int
    num_bytes_out: int

    @property
    def work(self) -> float:
        """The cost by which a network is cut, see `combined_work`."""
        return combined_work(self.num_flops, self.num_bytes_moved, self.num_operations)


def combined_work(num_flops: float, num_bytes_moved: float, num_operations: float) -> float:
    """What a core does for a layer, in floating-point operations of the same duration."""
    return num_flops + FLOPS_PER_BYTE * num_bytes_moved + FLOPS_PER_OPERATION * num_operations


def count_costs(layers: Layers, sample: Value) -> tuple[LayerCost, ...]:
    """Costs of every layer for a micro-batch like ``sample``, whose values are not looked at.

    Raises whatever a layer raises that cannot run on meta tensors.
    """
    tensors, is_tuple = flatten(sample, "the sample")
    value = unflatten([tensor.to("meta") for tensor in tensors], is_tuple)
    costs = []
    with preserved_generators(torch.device("cpu")), torch.no_grad():
        for index, layer in enumerate(named_layers(layers)):
            module = layer.build_without_data(index)
            # A module that exists already keeps its weights: stand-ins of the same shapes take their place.
            stand_ins = {
                name: torch.empty_like(tensor, device="meta")
                for name, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            traffic = _Traffic()
            with FlopCounterMode(display=False) as flops, traffic:
                value = torch.func.functional_call(module, stand_ins, (value,))
            out, _ = flatten(value, f"layer {layer.name!r}")
            costs.append(
                LayerCost(
                    layer.name,
                    sum(parameter.numel() for parameter in module.parameters()),
                    int(flops.get_total_flops()),
                    traffic.num_bytes,
                    traffic.num_operations,
                    sum(tensor.nbytes for tensor in out),
                )
            )
    return tuple(costs)


def measure_layers(
    layers: Layers, sample: Value, device: torch.device, num_repeats: int = 8, seed: int = 0
) -> tuple[float, ...]:
    """Median seconds of each layer's forward and backward pass on ``sample``, after one warm-up.

    As in training: several layers forward, then backward, so that a layer does not find its own data in the caches;
    gradients accumulate, and what needs none gets none. NUM_TOGETHER layers are on the device at a time.
    Modules given as such keep weights, buffers, gradients, modes and random states.
    """
    tensors, is_tuple = flatten(sample, "the sample")
    values = tuple(tensor.to(device) for tensor in tensors)
    named = named_layers(layers)
    seconds: list[float] = []
    with preserved_generators(device):
        for start in range(0, len(named), NUM_TOGETHER):
            modules = [layer.build(start + i, seed) for i, layer in enumerate(named[start : start + NUM_TOGETHER])]
            with ExitStack() as stack:
                for module in modules:
                    stack.enter_context(_untouched(module))
                    module.to(device).train()
                runs = [_time_once(modules, values, is_tuple, device) for _ in range(num_repeats + 1)]
            seconds += [statistics.median(times) for times in zip(*(run[0] for run in runs[1:]), strict=True)]
            _, values, is_tuple = runs[-1]
    return tuple(seconds)


def _time_once(
    modules: Sequence[nn.Module], values: tuple[Tensor, ...], is_tuple: bool, device: torch.device
) -> tuple[list[float], tuple[Tensor, ...], bool]:
    """Seconds of each module's passes, and the last one's outputs; values require gradients where training's do."""
    seconds: list[float] = []
    passed: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []  # each module's inputs and outputs
    with torch.enable_grad():
        for module in modules:
            entries = unflatten([leaf.clone() for leaf in values], is_tuple)
            time_s, (out, is_tuple) = _timed(partial(_outputs, module, entries), device)
            seconds.append(time_s)
            passed.append((values, out))
            values = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in out)
        gradients: list[Tensor | None] = [torch.ones_like(tensor) for tensor in values]
        while passed:
            leaves, out = passed.pop()
            pairs = [p for p in zip(out, gradients, strict=True) if p[0].requires_grad and p[1] is not None]
            if pairs:
                roots, given = [root for root, _ in pairs], [gradient for _, gradient in pairs]
                time_s, _ = _timed(partial(torch.autograd.backward, roots, given), device)
                seconds[len(passed)] += time_s
            gradients = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
    return seconds, values, is_tuple


def _outputs(module: nn.Module, value: Value) -> tuple[tuple[Tensor, ...], bool]:
    return flatten(module(value), "the layer")


def _timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    _synchronise(device)
    began = time.perf_counter()
    result = work()
    _synchronise(device)
    return time.perf_counter() - began, result


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _untouched(module: nn.Module) -> Any:
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    modes = [(child, child.training) for child in module.modules()]
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for child, training in modes:
            child.training = training


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that do work, and the bytes of the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if does_work(func):
            self.num_operations += 1
            self.num_bytes += sum(item.nbytes for item in tree_iter((args, kwargs, out)) if isinstance(item, Tensor))
        return out
