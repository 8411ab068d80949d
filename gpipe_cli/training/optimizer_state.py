"""Optimizer state as named tensors, so that any cut of the network finds the state of its own parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.errors import TrainingError

PREFIX = "optimizer/"
# Numbers become tensors; the suffix of the key says which type they have to be again.
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
# LAMB and Adan count in the group rather than with each parameter.
_GROUP_COUNTERS = ("step",)
_GROUP = "group."


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> dict[str, Tensor]:
    """State of every parameter as "optimizer/<parameter name>/<state key>", detached, not copied.

    Python numbers and None become tensors, under keys that end in their type ("…/step:int"). Counters of a
    parameter group are stored with each of its parameters ("…/group.step"). Raises TrainingError for state of
    another type.
    """
    tensors = {}
    for name, parameter, group in _parameters(optimizer, names):
        state = dict(optimizer.state.get(parameter, {}))
        if state:
            state.update({_GROUP + key: group[key] for key in _GROUP_COUNTERS if key in group})
        for key, value in state.items():
            suffix, tensor = _encode(value, f"{type(optimizer).__name__} keeps {key!r} of {name}")
            tensors[f"{PREFIX}{name}/{key}{suffix}"] = tensor
    return tensors


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str], tensors: Mapping[str, Tensor]
) -> None:
    """Put state written by `optimizer_tensors` back, bit for bit. `tensors` may hold other keys and other ranks' state.

    A parameter without entries keeps an empty state, as before its first gradient.
    """
    stored: dict[str, dict[str, Tensor]] = {}
    for full_key, tensor in tensors.items():
        if full_key.startswith(PREFIX):
            name, _, key = full_key.removeprefix(PREFIX).rpartition("/")
            stored.setdefault(name, {})[key] = tensor
    for name, parameter, group in _parameters(optimizer, names):
        state: dict[str, Any] = {}
        for key_and_type, tensor in stored.get(name, {}).items():
            key, _, kind = key_and_type.partition(":")
            value = _decode(tensor, kind) if kind else _placed(tensor, parameter, on_cpu=_stays_on_cpu(key, group))
            if key.startswith(_GROUP):
                group[key.removeprefix(_GROUP)] = value
                continue
            state[key] = value
        if state:
            optimizer.state[parameter] = state


def _parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]
) -> Iterator[tuple[str, torch.nn.Parameter, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter, group


def _encode(value: object, what: str) -> tuple[str, Tensor]:
    if isinstance(value, Tensor):
        return "", value.detach()
    if value is None:
        return ":none", torch.empty(0)
    dtype = _NUMBERS.get(type(value))
    if dtype is None:
        raise TrainingError(f"{what} as {type(value).__name__}, which a checkpoint cannot hold: use another optimizer")
    return f":{type(value).__name__}", torch.tensor(value, dtype=dtype)


def _decode(tensor: Tensor, kind: str) -> bool | int | float | None:
    return None if kind == "none" else tensor.item()


def _stays_on_cpu(key: str, group: Mapping[str, Any]) -> bool:
    # torch and timm count steps on the CPU, unless the update itself runs in a captured or fused kernel.
    return key.removeprefix(_GROUP) == "step" and not (group.get("capturable") or group.get("fused"))


def _placed(tensor: Tensor, parameter: torch.nn.Parameter, *, on_cpu: bool) -> Tensor:
    """A copy on the parameter's device in its memory format, which decides the order of sums in some optimizers."""
    if on_cpu:
        return tensor.clone()
    if tensor.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.to(parameter.device, copy=True)
