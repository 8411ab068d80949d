"""Keeping layers as they are: no gradient, no update, and running statistics that do not move either.

A frozen layer runs in evaluation mode. Its batch norms normalise by the statistics that they have, so the layer gives
for a picture what it gave before, whatever else is in the mini-batch, and the engine, which tracks the statistics of
layers in training mode only, leaves them alone. Dropout and drop path are off in it for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Frozen:
    """Freezes modules, for good or for the first optimizer steps of a run.

    Args:
        modules: this rank's layers that are to stay as they are.
        num_steps: optimizer steps that they stay so; None: all.
        run_steps: optimizer steps of the whole run, which `set_progress` tells fractions of.
    """

    def __init__(self, modules: Iterable[nn.Module], num_steps: int | None = None, run_steps: int = 0) -> None:
        self._modules = tuple(modules)
        # What the network's author has frozen stays frozen.
        self._parameters = [p for module in self._modules for p in module.parameters() if p.requires_grad]
        self._modes = [(module, module.training) for layer in self._modules for module in layer.modules()]
        self._num_steps = num_steps
        self._run_steps = run_steps
        self._frozen = False
        self.freeze()

    def freeze(self) -> None:
        """No gradients, evaluation mode."""
        self._frozen = True
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        for module in self._modules:
            module.eval()

    def release(self) -> None:
        """Gradients and modes as they were before."""
        self._frozen = False
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        for module, training in self._modes:
            module.training = training

    def set_progress(self, fraction: float) -> None:
        """Freeze or release before the step at `fraction` of the run; the loop calls it before every step."""
        frozen = self._num_steps is None or round(fraction * self._run_steps) < self._num_steps
        if frozen != self._frozen:
            (self.freeze if frozen else self.release)()
