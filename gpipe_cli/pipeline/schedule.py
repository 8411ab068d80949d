"""The order of work as a value: which operation every rank runs, and when.

A schedule is plain data. The policies make it, the runtime executes it, the validator proves it, simulators and plots
read it; nobody rebuilds the order. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class OperationKind(str, Enum):
    """What a stage does to a micro-batch.

    A backward pass gives the gradients of inputs and of weights, or leaves the latter to an operation of their own.
    """

    FORWARD = "F"
    REMATERIALIZE = "R"
    BACKWARD = "B"
    WEIGHTS = "W"


@dataclass(frozen=True)
class Operation:
    """One stage's work on one micro-batch; its short text form is such as ``2F0`` (stage 2, forward, micro-batch 0)."""

    stage: int
    kind: OperationKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Event:
    """When an operation ran, in seconds; measured by a runtime or predicted by a simulation."""

    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """For every rank an ordered tuple of operations.

    ``stages_of_rank[r]`` are the stages that rank r hosts, ``operations[r]`` what it runs. ``tapered``: whether the
    first and last micro-batches are smaller than the others (see sizes).
    """

    policy: str
    remat: str
    num_stages: int
    num_micro_batches: int
    stages_of_rank: tuple[tuple[int, ...], ...]
    operations: tuple[tuple[Operation, ...], ...]
    tapered: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks (processes) that the stages are spread over."""
        return len(self.stages_of_rank)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that hosts each stage."""
        homes = {stage: rank for rank, stages in enumerate(self.stages_of_rank) for stage in stages}
        return tuple(homes[stage] for stage in range(self.num_stages))

    @cached_property
    def rematerialized(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose activations are dropped after the forward pass and recomputed."""
        return frozenset(
            (op.stage, op.micro_batch)
            for ops in self.operations
            for op in ops
            if op.kind is OperationKind.REMATERIALIZE
        )

    @cached_property
    def deferred(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose gradients of weights have an operation of their own."""
        return frozenset().union(*(deferred_in(operations) for operations in self.operations))


F, R, B, W = OperationKind


def predecessors(schedule: Schedule, op: Operation) -> tuple[Operation, ...]:
    """The operations whose results ``op`` needs: the one dependency rule of the project."""
    here = Operation(op.stage, F, op.micro_batch)
    if op.kind is F:
        return (Operation(op.stage - 1, F, op.micro_batch),) if op.stage > 0 else ()
    if op.kind is R:
        return (here,)
    if op.kind is W:
        return (Operation(op.stage, B, op.micro_batch),)
    recomputed = (op.stage, op.micro_batch) in schedule.rematerialized
    own = Operation(op.stage, R, op.micro_batch) if recomputed else here
    if op.stage == schedule.num_stages - 1:
        return (own,)
    return (own, Operation(op.stage + 1, B, op.micro_batch))


def messages(schedule: Schedule, sender: int, receiver: int, kind: OperationKind) -> list[tuple[int, int]]:
    """What ``sender`` sends to ``receiver``, in order: the (stage, micro-batch) that each message is for."""
    step = 1 if kind is F else -1
    homes = schedule.rank_of_stage
    return [
        (op.stage + step, op.micro_batch)
        for op in schedule.operations[sender]
        if op.kind is kind
        and 0 <= op.stage + step < schedule.num_stages
        and homes[op.stage + step] == receiver != sender
    ]


def stage_weights(schedule: Schedule) -> tuple[float, ...]:
    """Each stage's work in a mini-batch relative to a stage that recomputes nothing.

    A backward pass counts as two forward passes: it computes the gradients of inputs and of weights, or one of them.
    """
    work = Counter[int]()
    for ops in schedule.operations:
        for op in ops:
            whole = op.kind is B and (op.stage, op.micro_batch) not in schedule.deferred
            work[op.stage] += 2 if whole else 1
    return tuple(work[stage] / (3 * schedule.num_micro_batches) for stage in range(schedule.num_stages))


def max_stored_micro_batches(schedule: Schedule, stage: int) -> int:
    """Largest number of micro-batches between forward and backward pass on ``stage`` at any time."""
    stored = most = 0
    for op in schedule.operations[schedule.rank_of_stage[stage]]:
        if op.stage == stage:
            stored += (op.kind is F) - ends(op, schedule.deferred)
            most = max(most, stored)
    return most


def deferred_in(operations: Iterable[Operation]) -> frozenset[tuple[int, int]]:
    """Those of a rank's operations, see Schedule.deferred."""
    return frozenset((op.stage, op.micro_batch) for op in operations if op.kind is W)


def ends(op: Operation, deferred: Set[tuple[int, int]]) -> bool:
    """Whether nothing of its micro-batch is left to do on the stage after ``op``; ``deferred``: see Schedule."""
    return op.kind is W or (op.kind is B and (op.stage, op.micro_batch) not in deferred)


def max_held_micro_batches(operations: Sequence[Operation], stage: int) -> int:
    """Largest number of micro-batches whose activations ``stage`` holds at any time; ``operations`` are its rank's."""
    own = [op for op in operations if op.stage == stage]
    recomputed = {op.micro_batch for op in own if op.kind is R}
    deferred = deferred_in(own)
    held = most = 0
    for op in own:
        if ends(op, deferred):
            held -= 1
        elif op.kind is R or (op.kind is F and op.micro_batch not in recomputed):
            held += 1
            most = max(most, held)
    return most


def num_not_recomputed(schedule: Schedule) -> tuple[int, ...]:
    """By stage, how many of the mini-batch's micro-batches are not recomputed."""
    recomputed = Counter(stage for stage, _ in schedule.rematerialized)
    return tuple(schedule.num_micro_batches - recomputed[stage] for stage in range(schedule.num_stages))


def format_schedule(schedule: Schedule, rank: int | None = None, index: int | None = None) -> str:
    """The grid, a line a rank; the operation at (rank, index) is marked with brackets."""
    lines = []
    for r, ops in enumerate(schedule.operations):
        cells = [f"[{op}]" if (r, i) == (rank, index) else str(op) for i, op in enumerate(ops)]
        lines.append(f"rank {r}: " + " ".join(cells))
    return "\n".join(lines)
