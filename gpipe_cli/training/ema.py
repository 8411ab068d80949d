"""Moving average of the weights, for evaluation (the authors' TPU code: 0.9999, of weights and BatchNorm statistics).

timm's `ModelEmaV3` does the averaging. It copies a module; here it gets one that only holds the tensors, each once,
because a pipeline stage carries the engine's hooks, which are not to be copied, and tied parameters must not move
twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gpipe_cli.errors import TrainingError

PREFIX = "ema/"
_ANCHOR = "anchor"
_START, _DOT = "tensor:", "\x1f"


class WeightAverage:
    """Exponential moving average of every parameter and persistent buffer of `module`.

    Args:
        module: this rank's part of the network, e.g. `pipe.module`.
        decay: share of the old average kept each step, in (0, 1).
        warmup: use `min(decay, (1 + n) / (10 + n))` for the n-th update, as the reference does (TensorFlow's
            `ExponentialMovingAverage` with `num_updates`), so that a short run is not an average with its initial
            weights.

    Integer buffers are copied, not averaged.
    """

    def __init__(self, module: nn.Module, decay: float, *, warmup: bool = True) -> None:
        from timm.utils.model_ema import ModelEmaV3

        self._module = module
        self._warmup = warmup
        # 1 - (1 + s / 9) ** -1 with s = n + 1 is (1 + n) / (10 + n).
        self._ema = ModelEmaV3(
            _Tensors(module), decay=decay, use_warmup=warmup, warmup_gamma=9.0, warmup_power=1.0, foreach=True
        )

    def update(self, step: int) -> None:
        """Move the average towards the weights. `step`: optimizer steps made so far, this one included."""
        # timm subtracts one from its step, hence n + 2; without warm-up it takes no step at all.
        self._ema.update(_Tensors(self._module), step=step + 2 if self._warmup else None)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the block the module holds the averaged values; afterwards exactly what it held before."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by "ema/<name in the module's own state_dict>"; a tied tensor is listed once."""
        averages = self._ema.module.state_dict()
        return {PREFIX + _outer(name): value for name, value in averages.items() if name != _ANCHOR}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the averages from `tensors`, which may hold more keys. Raises TrainingError for a missing one."""
        own = self.state_dict()
        missing = sorted(own.keys() - tensors.keys())
        if missing:
            raise TrainingError(
                f"the checkpoint lacks {len(missing)} averaged tensors, among them {missing[0]}; use ema_decay=0"
            )
        for key, value in own.items():
            value.copy_(tensors[key])

    @torch.no_grad()
    def _swap(self) -> None:
        live = _Tensors(self._module).state_dict(keep_vars=True)
        for name, averaged in self._ema.module.state_dict(keep_vars=True).items():
            # Exchanging the data copies nothing, so it needs no memory and restores every bit.
            live[name].data, averaged.data = averaged.data, live[name].data


class _Tensors(nn.Module):
    """The parameters and persistent buffers of a module, each once, by reference."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # ModelEmaV3 asks for the device of the first parameter, also of a stage that has none.
        tensors = module.state_dict(keep_vars=True)
        first = next(iter(tensors.values()), torch.empty(0))
        self.register_parameter(_ANCHOR, nn.Parameter(torch.empty(0, device=first.device), requires_grad=False))
        seen: set[int] = set()
        for name, tensor in tensors.items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(_inner(name), tensor)
            else:
                self.register_buffer(_inner(name), tensor)


def _inner(name: str) -> str:
    """A name without dots, which a registered tensor must not have, and unlike any attribute of nn.Module."""
    return _START + name.replace(".", _DOT)


def _outer(name: str) -> str:
    return name.removeprefix(_START).replace(_DOT, ".")
