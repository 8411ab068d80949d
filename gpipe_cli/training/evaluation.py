"""Evaluation: every sample of a split once, counted where the outputs are, known everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from gpipe_cli.training.batches import evaluation_batches
from gpipe_cli.training.communication import from_last
from gpipe_cli.training.task import Batches, Counter, Result, Split, Task

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig
    from gpipe_cli.pipeline import Pipeline, ProcessGroups


class Evaluable(Protocol):
    """One rank's part of a network and the samples for it: a Session, or a network from a checkpoint."""

    @property
    def config(self) -> TrainConfig: ...

    @property
    def groups(self) -> ProcessGroups | None: ...

    @property
    def task(self) -> Task: ...

    @property
    def pipe(self) -> Pipeline: ...


def evaluate(session: Evaluable, split: Split = "eval") -> Result:
    """What the current weights make of a split, the same on every rank. Collective."""
    return session.task.result(from_last(session.groups, count(session, session.task.counter(), split).tolist()))


def count(
    session: Evaluable, counter: Counter, split: Split = "eval", watch: Callable[[int], None] | None = None
) -> Tensor:
    """The counts of a split: what `counter` found on the last stage's rank, elsewhere of nothing. Collective.

    `watch`: told on the first stage's rank how many batches are done.
    """
    pipe, task = session.pipe, session.task
    loader = _watched(task.eval_batches(split), watch) if pipe.is_first else None
    batches = evaluation_batches(pipe, session.groups, loader, channels_last=session.config.channels_last)
    for inputs, targets in batches:
        outputs = pipe.evaluate(inputs)
        if outputs is not None:
            assert isinstance(targets, Tensor)
            counter.update(outputs, targets.to(pipe.device))
    return counter.counts()


def _watched(batches: Batches, watch: Callable[[int], None] | None) -> Iterator[tuple[Tensor, Tensor]]:
    for number, batch in enumerate(batches, start=1):
        yield batch
        if watch is not None:
            watch(number)
