"""What an operation on meta tensors would compute and move: the recorder that counting layers runs under.

Layers run with `SAMPLES` samples, a prime number: sizes that it divides grow with the micro-batch, the others (weights
and their gradients) do not. So one count serves every size of micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

SAMPLES = 251

_ATEN = torch.ops.aten
# The fused attention of CPUs has no entry of its own in torch's table of operations.
_FLOPS_AS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
# They set up memory and move nothing.
_FREE = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}


@dataclass(frozen=True)
class Amount:
    """Bytes or operations of a micro-batch of n samples: `fixed + n * per_sample`."""

    fixed: float = 0
    per_sample: float = 0

    def at(self, num_samples: int) -> float:
        return self.fixed + num_samples * self.per_sample

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)


NOTHING = Amount()


@dataclass(frozen=True)
class Work:
    """One operation on the device: floating-point operations and bytes read and written."""

    flops: Amount
    moved_bytes: Amount


def total(amounts: Iterable[Amount]) -> Amount:
    """The sum of amounts."""
    fixed = per_sample = 0.0
    for amount in amounts:
        fixed += amount.fixed
        per_sample += amount.per_sample
    return Amount(fixed, per_sample)


def tensor_bytes(tensor: Tensor, width: float) -> Amount:
    """Bytes of a tensor's values; `width`: of a float32 activation relative to four."""
    return _amount(tensor.nbytes, tensor, width)


def storage_bytes(tensor: Tensor, width: float) -> Amount:
    """Bytes of the memory that a tensor is a view of."""
    return _amount(tensor.untyped_storage().nbytes(), tensor, width)


def _amount(num_bytes: int, tensor: Tensor, width: float) -> Amount:
    if num_bytes % SAMPLES:
        return Amount(fixed=num_bytes)
    scale = width if tensor.is_floating_point() and tensor.dtype is torch.float32 else 1.0
    return Amount(per_sample=num_bytes * scale / SAMPLES)


def does_work(func: Any) -> bool:
    """Whether a torch operation computes or moves anything: views and allocations do not."""
    return not func.is_view and func._overloadpacket not in _FREE


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the work of every operation but views and allocations."""

    def __init__(self, activation_width: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Work] = []
        self._width = activation_width

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if not does_work(func):
            return out
        moved = total(
            tensor_bytes(item, self._width) for item in tree_iter((args, kwargs, out)) if isinstance(item, Tensor)
        )
        formula = flop_registry.get(_FLOPS_AS.get(packet, packet))
        flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
        self.work.append(Work(Amount(flops, 0) if flops % SAMPLES else Amount(0, flops / SAMPLES), moved))
        return out


class Attention(TorchFunctionMode):
    """Attention as the fused kernels do it; on meta tensors torch itself would take the plain formula."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self._fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and self._fused_here(args, kwargs):
            kwargs.pop("enable_gqa", None)
            kwargs["dropout_p"] = 0.0
            return _ATEN._scaled_dot_product_flash_attention_for_cpu(*args[:3], **kwargs)[0]
        return func(*args, **kwargs)

    def _fused_here(self, args: Any, kwargs: dict[str, Any]) -> bool:
        return len(args) == 3 and (self._fused or not kwargs.get("dropout_p"))
