"""What every layer computes, moves and keeps, forward and backward, counted on the meta device.

Each layer runs once on meta tensors (shapes without data), and layers that are equal - equal factories on equal input
shapes - only once for all: 1663 Transformer blocks cost as much as one. Nothing is allocated or computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .deferral import Products
from .layers import Layers, NamedLayer, named_layers
from .microbatch import Value, flatten, unflatten
from .randomness import preserved_generators
from .recording import SAMPLES, Amount, Attention, Recorder, Work, storage_bytes, tensor_bytes, total


@dataclass(frozen=True)
class LayerOutput:
    """A tensor that a layer hands on. `alias`: index of the input that it is, None when the layer made it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    alias: int | None
    saved: bool
    num_bytes: Amount


@dataclass(frozen=True)
class LayerCount:
    """One layer, counted. `saved_inside`: what autograd keeps besides inputs, outputs and parameters; `waiting`: what
    is held while the gradients of weights wait, after those of inputs."""

    num_parameters: int
    num_parameter_tensors: int
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    saved_inside: Amount
    waiting: Amount
    saved_inputs: tuple[bool, ...]
    outputs: tuple[LayerOutput, ...]
    outputs_are_tuple: bool


@dataclass(frozen=True)
class NetworkCount:
    """A network, counted: its layers under their names, the bytes of what goes in, and the loss as one more layer."""

    names: tuple[str, ...]
    layers: tuple[LayerCount, ...]
    loss: LayerCount
    input_bytes: Amount


class Loss(nn.Module):
    """Cross-entropy of logits (..., classes), of auxiliary logits as well where there are any; else a mean."""

    def forward(self, outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        losses = [_loss(output) for output in ((outputs,) if isinstance(outputs, Tensor) else outputs)]
        return functools.reduce(torch.add, losses)


def _loss(logits: Tensor) -> Tensor:
    if logits.dim() < 2:
        return logits.float().mean()
    rows = logits.flatten(0, -2).float()
    return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device))


def count_network(
    layers: Layers,
    sample: Tensor,
    *,
    activation_width: float = 1.0,
    fused_attention: bool = True,
    loss: Callable[[], nn.Module] = Loss,
) -> NetworkCount:
    """Counts every layer for inputs like those of `sample`, a meta tensor with one sample: shape (1, ...).

    `activation_width`: bytes of a floating-point activation relative to float32 (0.5 under bfloat16 autocast).
    `fused_attention`: attention keeps no (T, T) weights, as on GPUs and, without dropout, on CPUs.
    `loss` makes a module that gives the loss of the last layer's outputs, of whatever targets.
    Raises whatever a layer raises that cannot run on meta tensors.
    """
    known: dict[Hashable, LayerCount] = {}
    counts, names = [], []
    inputs = torch.empty((SAMPLES, *sample.shape[1:]), dtype=sample.dtype, device="meta")
    input_bytes = tensor_bytes(inputs, activation_width)
    value: Value = inputs
    count = functools.partial(_count, activation_width=activation_width, fused_attention=fused_attention)
    with preserved_generators(torch.device("cpu")):
        for index, layer in enumerate([*named_layers(layers), NamedLayer("loss", loss)]):
            tensors, is_tuple = flatten(value, f"layer {layer.name!r}")
            key = (_identity(layer.source), is_tuple, tuple((t.shape, t.dtype, t.requires_grad) for t in tensors))
            if key not in known:
                module = layer.build_without_data(index)
                known[key] = count(module, tensors, is_tuple)
            counts.append(known[key])
            names.append(layer.name)
            value = _outputs(known[key], tensors)
    return NetworkCount(tuple(names[:-1]), tuple(counts[:-1]), counts[-1], input_bytes)


def _identity(source: object) -> Hashable:
    """Equal for factories that build equal layers: functools.partial compares by identity, so look inside."""
    if isinstance(source, functools.partial):
        keywords = tuple(sorted((name, _identity(value)) for name, value in source.keywords.items()))
        return (source.func, tuple(_identity(argument) for argument in source.args), keywords)
    try:
        hash(source)
    except TypeError:
        return id(source)
    return (type(source).__name__, source)


def _outputs(count: LayerCount, inputs: Sequence[Tensor]) -> Value:
    tensors = [
        inputs[output.alias]
        if output.alias is not None and inputs[output.alias].shape == output.shape
        else torch.empty(output.shape, dtype=output.dtype, device="meta", requires_grad=output.requires_grad)
        for output in count.outputs
    ]
    return unflatten(tensors, count.outputs_are_tuple)


def _count(
    module: nn.Module, inputs: Sequence[Tensor], is_tuple: bool, *, activation_width: float, fused_attention: bool
) -> LayerCount:
    parameters = {name: _stand_in(p) for name, p in module.named_parameters()}
    buffers = {name: torch.empty_like(b, device="meta") for name, b in module.named_buffers()}
    for parameter in parameters.values():
        parameter.grad = torch.empty_like(parameter)  # adding to what is there is part of a micro-batch's work
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    recorder = Recorder(activation_width)
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved.setdefault(_storage(tensor), tensor)
        return tensor

    products = Products()
    with (
        recorder,
        Attention(fused_attention),
        products,
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        value = torch.func.functional_call(module, {**parameters, **buffers}, (unflatten(leaves, is_tuple),))
        outputs, outputs_are_tuple = flatten(value, type(module).__name__)
        num_forward = len(recorder.work)
        roots = [output for output in outputs if output.requires_grad]
        kept = dict(saved)
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    places = {_storage(leaf): index for index, leaf in enumerate(leaves)}
    outside = {_storage(t) for t in (*parameters.values(), *buffers.values(), *outputs)} | set(places)
    inside = [tensor for storage, tensor in kept.items() if storage not in outside]
    inputs_of_products = {_storage(tensor): tensor for tensor in products.inputs}
    return LayerCount(
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_parameter_tensors=len(parameters),
        forward=tuple(recorder.work[:num_forward]),
        backward=tuple(recorder.work[num_forward:]),
        saved_inside=total(storage_bytes(tensor, activation_width) for tensor in inside),
        waiting=total(
            storage_bytes(tensor, activation_width) for tensor in (*inputs_of_products.values(), *products.outputs)
        ),
        saved_inputs=tuple(_storage(leaf) in kept for leaf in leaves),
        outputs=tuple(
            LayerOutput(
                tuple(output.shape),
                output.dtype,
                output.requires_grad,
                places.get(_storage(output)),
                _storage(output) in kept,
                tensor_bytes(output, activation_width),
            )
            for output in outputs
        ),
        outputs_are_tuple=outputs_are_tuple,
    )


def _stand_in(parameter: nn.Parameter) -> Tensor:
    return torch.empty_like(parameter, device="meta").requires_grad_(parameter.requires_grad)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # meta tensors have no address
