"""The learning rate of every optimizer step: linear warm-up, then timm's schedule or inverse_sqrt.py's.

The rate is a pure function of the step, so a resumed run continues with the row it would have had.

Where sources differ: the reference (tensorflow/tpu, amoeba_net, `model_builder.build_learning_rate`) ramps from
zero, so that its first step changes nothing; here step `s` of a warm-up of `W` steps has `base * (s + 1) / W`,
which reaches the base rate on the last warm-up step. `exponential` follows the reference otherwise: a staircase
`base * decay_rate ** floor(epoch / decay_epochs)` whose epochs are counted from the first step of training, warm-up
included, so that the rate falls to `base * decay_rate ** floor(warmup_epochs / decay_epochs)` as warm-up ends.
`step` is the same staircase counted from the end of warm-up, and `cosine` begins at the end of warm-up and ends one
step before its minimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gpipe_cli.training.inverse_sqrt import inverse_sqrt_lr

if TYPE_CHECKING:
    from timm.scheduler.scheduler import Scheduler

    from gpipe_cli.config import LrScheduleConfig


class LrSchedule:
    """Learning rate by optimizer step.

    Args:
        config: kind of schedule, `warmup_epochs` or `warmup_steps`, `decay_epochs` (fractions of an epoch are allowed),
            `decay_rate`, `min_lr`.
        base_lr: the rate that warm-up reaches.
        steps_per_epoch: optimizer steps an epoch, 1 or more.
        epochs: the horizon. A warm-up longer than it is a ramp that ends at `base_lr * epochs / warmup_epochs`.
    """

    def __init__(self, config: LrScheduleConfig, base_lr: float, steps_per_epoch: int, epochs: int) -> None:
        self.base_lr = base_lr
        self.epochs = epochs
        self.num_steps = epochs * steps_per_epoch
        self._warmup_steps = config.warmup_steps or round(config.warmup_epochs * steps_per_epoch)
        # A minimum above the base rate must not raise the rate.
        self._min_lr = min(config.min_lr, base_lr)
        # timm moves the rate of an optimizer; this one has nothing to optimize and exists to be read.
        self._carrier = torch.optim.SGD([{"params": []}], lr=base_lr)
        # Counted from the last warm-up step, which has the base rate, except for the reference's staircase.
        self._start = 0 if config.name == "exponential" else max(self._warmup_steps - 1, 0)
        self._scheduler = self._build(config, steps_per_epoch) if config.name != "inverse_sqrt" else None

    def lr_at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0. Never negative, never above the base rate."""
        if self._scheduler is None:
            return max(inverse_sqrt_lr(step, self.base_lr, self._warmup_steps), self._min_lr)
        if step < self._warmup_steps:
            return self.base_lr * (step + 1) / self._warmup_steps
        self._scheduler.step_update(step - self._start)
        return max(float(self._carrier.param_groups[0]["lr"]), self._min_lr)

    def _build(self, config: LrScheduleConfig, steps_per_epoch: int) -> Scheduler:
        from timm.scheduler.cosine_lr import CosineLRScheduler
        from timm.scheduler.step_lr import StepLRScheduler

        if config.name == "cosine":
            # timm logs a warning for a cosine of one step; a horizon that ends with warm-up never reads it.
            length = max(self.num_steps - self._start, 2)
            return CosineLRScheduler(self._carrier, t_initial=length, lr_min=self._min_lr, t_in_epochs=False)
        decay_rate = 1.0 if config.name == "constant" else config.decay_rate
        # Rounded so that 0.7 epochs of 10 steps are 7 steps, and not a hair more.
        decay_steps = round(config.decay_epochs * steps_per_epoch, 6)
        return StepLRScheduler(self._carrier, decay_t=decay_steps, decay_rate=decay_rate, t_in_epochs=False)


def describe_horizon_change(old: LrSchedule, new: LrSchedule, step: int) -> str | None:
    """One line for a run resumed at `step` with other epochs: both horizons and the rates where they meet.

    None where the number of epochs is the same.
    """
    if old.epochs == new.epochs:
        return None
    before = f"{old.lr_at(step - 1):.6g}" if step > 0 else "none"
    return (
        f"epochs changed from {old.epochs} to {new.epochs}: the learning-rate schedule now ends at step "
        f"{new.num_steps} (was {old.num_steps}); rate at step {step}: {new.lr_at(step):.6g} (step before: {before})"
    )
