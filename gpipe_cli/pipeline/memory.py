"""Activation memory by counting: the bytes that autograd holds for backward passes, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor


class ActivationMeter:
    """Context manager that counts the distinct storages saved for backward passes while it is active.

    ``peak_bytes`` is the largest number of bytes held at once. Storages of ``excluded`` tensors (parameters, buffers)
    do not count. Works the same on every device, because it counts tensors instead of asking an allocator.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._uses: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> ActivationMeter:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()  # not the data pointer: meta tensors have none
        if address not in self._excluded:
            if address not in self._uses:
                self._uses[address] = 0
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self._uses[address] += 1
            weakref.finalize(saved, self._release, address, size)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        return saved.tensor

    def _release(self, address: int, size: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            del self._uses[address]
            self.live_bytes -= size


class _Saved:
    """Holds a saved tensor; its end tells the meter that the graph has let go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
