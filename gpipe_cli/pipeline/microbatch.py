"""How a mini-batch becomes micro-batches, and how outputs are put together again.

The value that flows between layers is a tensor or a tuple of tensors whose first dimension is the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = Tensor | tuple[Tensor, ...]


def flatten(value: object, where: str) -> tuple[tuple[Tensor, ...], bool]:
    """The tensors of a value, and whether it was a tuple.

    Raises TypeError naming ``where`` (a layer, say) when it is neither a tensor nor a tuple of tensors.
    """
    if isinstance(value, Tensor):
        return (value,), False
    if isinstance(value, tuple) and value and all(isinstance(item, Tensor) for item in value):
        return value, True
    inside = f" of {', '.join(type(item).__name__ for item in value)}" if isinstance(value, (tuple, list)) else ""
    raise TypeError(
        f"{where} gives {type(value).__name__}{inside}: between layers a tensor or a tuple of tensors is allowed"
    )


def unflatten(tensors: Sequence[Tensor], is_tuple: bool) -> Value:
    """The inverse of :func:`flatten`."""
    return tuple(tensors) if is_tuple else tensors[0]


def num_samples(value: Value) -> int:
    """Size of the first dimension, which all tensors of the value share; raises ValueError otherwise."""
    tensors, _ = flatten(value, "the mini-batch")
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(sizes) != 1 or None in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"a mini-batch needs one number of samples in its first dimension; its shapes are {shapes}")
    return int(tensors[0].shape[0])


def split(value: Value, sizes: Sequence[int]) -> list[Value | None]:
    """Micro-batches of these sizes as views of the mini-batch; None for those without samples."""
    tensors, is_tuple = flatten(value, "the mini-batch")
    parts = [torch.split(tensor, list(sizes)) for tensor in tensors]
    return [unflatten([part[index] for part in parts], is_tuple) if size else None for index, size in enumerate(sizes)]


def merge(values: Sequence[Value]) -> Value:
    """Micro-batch outputs as one mini-batch output."""
    flat = [flatten(value, "the network") for value in values]
    columns = zip(*(tensors for tensors, _ in flat), strict=True)
    return unflatten([torch.cat(column) for column in columns], flat[0][1])
