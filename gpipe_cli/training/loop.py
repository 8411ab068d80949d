"""The training loop: one synchronous update per mini-batch, the same decisions on every rank.

Every rank walks through the same steps. What a decision depends on (a loss, an accuracy, whether weights are finite) is
the same everywhere, so ranks need no further talk to stop, save or go on together.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe_cli.errors import TrainingError
from gpipe_cli.training.background_saving import BackgroundSaver
from gpipe_cli.training.batches import training_batches
from gpipe_cli.training.evaluation import evaluate
from gpipe_cli.training.networks import batch_norm_lacks_values, too_small_for_batch_norm
from gpipe_cli.training.optimizer import set_learning_rate
from gpipe_cli.training.state import save_checkpoint

if TYPE_CHECKING:
    from gpipe_cli.pipeline import StepResult
    from gpipe_cli.reporting.report import RunReport
    from gpipe_cli.training.session import Session
    from gpipe_cli.training.task import Result


@dataclass
class Clock:
    """Times of this rank's steps; the first step of a run, which holds start-up costs, is left out."""

    num_steps: int = 0
    num_samples: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0
    started: bool = False

    def add(self, num_samples: int, step_s: float, wait_s: float) -> None:
        """Count a step of `step_s` seconds, `wait_s` of which this rank waited for its neighbours."""
        if self.started:
            self.num_steps += 1
            self.num_samples += num_samples
            self.step_s += step_s
            self.wait_s += wait_s
        self.started = True


@dataclass
class Outcome:
    """What came of a run on this rank."""

    steps: int
    clock: Clock
    evaluation: Result | None = None
    train_loss: float | None = None
    peak_memory_bytes: int = 0


@dataclass
class Trainer:
    """Runs a session from step `start` to its end. `report` is None on all ranks but the first."""

    session: Session
    run_dir: Path
    report: RunReport | None
    start: int = 0
    best_score: float | None = None
    clock: Clock = field(default_factory=Clock)
    _pending: list[tuple[int, Tensor]] = field(default_factory=list)
    _last_loss: float | None = None
    _saver: BackgroundSaver = field(init=False, repr=False)

    def run(self) -> Outcome:
        """Train, evaluate and save to the end; the last checkpoint is whole when it returns.

        Raises TrainingError when a loss or a weight is not finite, CheckpointError when a checkpoint cannot be written.
        """
        session = self.session
        if self.report is not None:
            session.task.report_to(self.report.message)
        step, evaluation = self.start, None
        with BackgroundSaver(session.groups) as self._saver:
            while step < session.num_steps:
                epoch = step // session.steps_per_epoch
                step = self._epoch(epoch, step)
                evaluation = self._end_of_epoch(epoch, step)
            if session.num_steps == 0:
                evaluation = self._end_of_epoch(-1, 0)
        return Outcome(
            steps=step,
            clock=self.clock,
            evaluation=evaluation,
            train_loss=self._last_loss,
            peak_memory_bytes=peak_memory_bytes(session.pipe.device),
        )

    def _epoch(self, epoch: int, step: int) -> int:
        """The rest of an epoch from `step` on, or up to the last step of the run; returns the steps done."""
        session, config = self.session, self.session.config
        start_batch = step - epoch * session.steps_per_epoch
        num_batches = min(session.steps_per_epoch - start_batch, session.num_steps - step)
        loader = session.task.train_batches(epoch, start_batch) if session.pipe.is_first else None
        began = time.perf_counter()
        batches = training_batches(session.pipe, loader, num_batches, channels_last=config.channels_last)
        for inputs, targets in batches:
            result = self._step(step, inputs, targets)
            step += 1
            now = time.perf_counter()
            self.clock.add(config.batch_size, now - began, result.wait_s)
            self._log(epoch, step, now - began)
            self._saver.check()
            began = time.perf_counter()
        return step

    def _step(self, step: int, inputs: Tensor | None, targets: Tensor | None) -> StepResult:
        session = self.session
        lr = session.lr_schedule.lr_at(step)
        set_learning_rate(session.optimizer, lr)
        for listener in session.progress_listeners:
            # Of the epochs, not of `steps`: a run that stops early has done what the whole one does until there.
            listener.set_progress(step / session.lr_schedule.num_steps)
        session.optimizer.zero_grad()
        result = self._forward_backward(inputs, targets)
        self._pending.append((step + 1, result.loss))
        if session.pipe.device.type == "cpu":
            self._check_losses()  # before the update; a GPU is asked only now and then, since asking stalls it
        if session.config.clip_grad_norm is not None:
            session.pipe.clip_grad_norm(session.config.clip_grad_norm)
        self._update(step, lr)
        if session.average is not None:
            session.average.update(step + 1)
        return result

    def _forward_backward(self, inputs: Tensor | None, targets: Tensor | None) -> StepResult:
        try:
            return self.session.pipe.forward_backward(inputs, targets)
        except ValueError as error:
            if not batch_norm_lacks_values(error):
                raise
            raise TrainingError(f"{too_small_for_batch_norm(self.session.config)} ({error})") from error

    def _update(self, step: int, lr: float) -> None:
        try:
            self.session.optimizer.step()
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            problem = f"the update of step {step + 1} does not fit a weight's type at the learning rate {lr:g}"
            raise TrainingError(f"{problem}: stopped; use a smaller optimizer.lr") from error

    def _check_losses(self) -> None:
        for step, loss in self._pending:
            value = float(loss)
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss is {value} at step {step}: stopped, and checkpoints are as they were; "
                    "use a smaller optimizer.lr, a longer lr_schedule.warmup_epochs, or clip_grad_norm=1"
                )
            self._last_loss = value
        self._pending.clear()

    def _log(self, epoch: int, step: int, step_s: float) -> None:
        session = self.session
        if step % session.config.log_every and step != session.num_steps:
            if self.report is not None:
                self.report.step(step)
            return
        self._check_losses()
        if self.report is not None:
            samples_per_s = session.config.batch_size / step_s
            row = {
                "step": step,
                "epoch": epoch,
                "loss": self._last_loss,
                "lr": session.lr_schedule.lr_at(step - 1),
                "samples_per_s": round(samples_per_s, 2),
            }
            row |= {name: round(rate, 1) for name, rate in session.task.rates(samples_per_s).items()}
            self.report.step(step, row)

    def _end_of_epoch(self, epoch: int, step: int) -> Result | None:
        session, config = self.session, self.session.config
        self._check_losses()
        last = step >= session.num_steps
        whole = step % session.steps_per_epoch == 0
        evaluation = None
        if last or (whole and config.eval_every and (epoch + 1) % config.eval_every == 0):
            evaluation = self._evaluate(epoch, step)
        if last or (whole and config.checkpoint_every and (epoch + 1) % config.checkpoint_every == 0):
            improved = evaluation is not None and self._improves(evaluation)
            if improved and evaluation is not None:
                self.best_score = evaluation.score
            save_checkpoint(session, self.run_dir, step, self.best_score, is_best=improved, saver=self._saver)
        return evaluation

    def _improves(self, evaluation: Result) -> bool:
        # A comparison with NaN is false: an epoch whose held-out loss is NaN is never the best.
        return math.isfinite(evaluation.loss) and (self.best_score is None or evaluation.score > self.best_score)

    def _evaluate(self, epoch: int, step: int) -> Result:
        session = self.session
        if session.average is not None and step > 0:
            with session.average.swapped():
                result = evaluate(session)
        else:
            result = evaluate(session)
        if self.report is not None:
            self.report.evaluation(step, epoch, result)
        return result


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: what was allocated on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
