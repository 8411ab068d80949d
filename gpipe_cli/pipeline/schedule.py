"""The order of work as a value: which operation every rank runs, and when.

A schedule is plain data. The runtime executes it, the validator proves it, simulators and plots read it; nobody
rebuilds the order. No torch here. Fill-drain ("gpipe") follows the paper, section 2.3 and Figure 2c (arXiv
1811.06965); "1f1b" starts a micro-batch's backward pass as soon as its forward pass has left the pipeline, as
PipeDream-flush and Megatron-LM do.

Fill-drain for K = 3 stages and M = 3 micro-batches (time runs to the right; F forward, B backward)::

    rank 0   F0 F1 F2             B2 B1 B0
    rank 1      F0 F1 F2       B2 B1 B0
    rank 2         F0 F1 F2 B2 B1 B0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise


class OperationKind(str, Enum):
    """What a stage does to a micro-batch."""

    FORWARD = "F"
    REMATERIALIZE = "R"
    BACKWARD = "B"


@dataclass(frozen=True)
class Operation:
    """One stage's work on one micro-batch; its short text form is such as ``2F0`` (stage 2, forward, micro-batch 0)."""

    stage: int
    kind: OperationKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """For every rank an ordered tuple of operations; consecutive stages live on a rank.

    ``stages_of_rank[r]`` are the stages that rank r hosts, ``operations[r]`` what it runs.
    """

    policy: str
    remat: str
    num_stages: int
    num_micro_batches: int
    stages_of_rank: tuple[tuple[int, ...], ...]
    operations: tuple[tuple[Operation, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks (processes) that the stages are spread over."""
        return len(self.stages_of_rank)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that hosts each stage."""
        return tuple(rank for rank, stages in enumerate(self.stages_of_rank) for _ in stages)

    @cached_property
    def rematerialized(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose activations are dropped after the forward pass and recomputed."""
        return frozenset(
            (op.stage, op.micro_batch)
            for ops in self.operations
            for op in ops
            if op.kind is OperationKind.REMATERIALIZE
        )


class ScheduleError(ValueError):
    """A schedule that cannot run: an operation missing or doubled, a deadlock, messages out of order."""


POLICIES = ("gpipe", "1f1b")
REMAT_MODES = ("full", "except_last", "none")

F, R, B = OperationKind.FORWARD, OperationKind.REMATERIALIZE, OperationKind.BACKWARD


def spread(num_stages: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive stages per rank, as even as possible, the first ranks taking one more.

    Raises ValueError unless 1 <= num_ranks <= num_stages.
    """
    if not 1 <= num_ranks <= num_stages:
        raise ValueError(f"num_ranks={num_ranks}: {num_stages} stages need between 1 and {num_stages} ranks")
    base, extra = divmod(num_stages, num_ranks)
    starts = [rank * base + min(rank, extra) for rank in range(num_ranks + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(starts))


def make_schedule(
    num_stages: int, num_micro_batches: int, policy: str = "gpipe", remat: str = "full", num_ranks: int | None = None
) -> Schedule:
    """The training schedule of one mini-batch.

    ``remat``: "full" recomputes every micro-batch whose backward pass does not follow its forward pass at once (there
    is nothing to save there: the activations are still needed); "except_last" also spares the last micro-batch, as
    torchgpipe does; "none" keeps all activations. Raises ValueError naming the argument.
    """
    if policy not in POLICIES:
        raise ValueError(f"schedule={policy}: choose one of {', '.join(POLICIES)}")
    if remat not in REMAT_MODES:
        raise ValueError(f"remat={remat}: choose one of {', '.join(REMAT_MODES)}")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches={num_micro_batches}: give a whole number of 1 or more")
    stages_of_rank = spread(num_stages, num_ranks if num_ranks is not None else num_stages)
    order: Callable[[int, int, int], Iterable[tuple[OperationKind, int]]] = {"gpipe": _fill_drain, "1f1b": _1f1b}[
        policy
    ]
    operations = tuple(
        tuple(
            _with_rematerialization(
                _unfold(order(rank, len(stages_of_rank), num_micro_batches), stages), num_micro_batches, remat
            )
        )
        for rank, stages in enumerate(stages_of_rank)
    )
    return Schedule(policy, remat, num_stages, num_micro_batches, stages_of_rank, operations)


def make_forward_schedule(num_stages: int, num_micro_batches: int, num_ranks: int | None = None) -> Schedule:
    """The schedule of an evaluation: forward passes only."""
    stages_of_rank = spread(num_stages, num_ranks if num_ranks is not None else num_stages)
    units = [(F, micro_batch) for micro_batch in range(num_micro_batches)]
    operations = tuple(tuple(_unfold(units, stages)) for stages in stages_of_rank)
    return Schedule("forward", "none", num_stages, num_micro_batches, stages_of_rank, operations)


def _fill_drain(rank: int, num_ranks: int, num_micro_batches: int) -> Iterable[tuple[OperationKind, int]]:
    del rank, num_ranks  # the order is the same on every rank
    yield from ((F, m) for m in range(num_micro_batches))
    yield from ((B, m) for m in reversed(range(num_micro_batches)))


def _1f1b(rank: int, num_ranks: int, num_micro_batches: int) -> Iterable[tuple[OperationKind, int]]:
    num_ahead = min(num_micro_batches, num_ranks - 1 - rank)
    yield from ((F, m) for m in range(num_ahead))
    for m in range(num_ahead, num_micro_batches):
        yield F, m
        yield B, m - num_ahead
    yield from ((B, m) for m in range(num_micro_batches - num_ahead, num_micro_batches))


def _unfold(units: Iterable[tuple[OperationKind, int]], stages: tuple[int, ...]) -> list[Operation]:
    """A rank's passes over all its stages: forward in order, backward in reverse."""
    return [
        Operation(stage, kind, micro_batch)
        for kind, micro_batch in units
        for stage in (stages if kind is F else reversed(stages))
    ]


def _with_rematerialization(operations: list[Operation], num_micro_batches: int, remat: str) -> Iterable[Operation]:
    previous: Operation | None = None
    for op in operations:
        if op.kind is B and remat != "none":
            still_fresh = previous == Operation(op.stage, F, op.micro_batch)
            spared = remat == "except_last" and op.micro_batch == num_micro_batches - 1
            if not still_fresh and not spared:
                yield Operation(op.stage, R, op.micro_batch)
        yield op
        previous = op


def predecessors(schedule: Schedule, op: Operation) -> tuple[Operation, ...]:
    """The operations whose results ``op`` needs: the one dependency rule of the project."""
    here = Operation(op.stage, F, op.micro_batch)
    if op.kind is F:
        return (Operation(op.stage - 1, F, op.micro_batch),) if op.stage > 0 else ()
    if op.kind is R:
        return (here,)
    recomputed = (op.stage, op.micro_batch) in schedule.rematerialized
    own = Operation(op.stage, R, op.micro_batch) if recomputed else here
    if op.stage == schedule.num_stages - 1:
        return (own,)
    return (own, Operation(op.stage + 1, B, op.micro_batch))


def validate_schedule(schedule: Schedule) -> None:
    """Prove that a training schedule runs: every operation once and at home, no deadlock, messages in order.

    Raises ScheduleError that shows the grid with the place marked.
    """
    expected = {
        Operation(stage, kind, micro_batch)
        for stage in range(schedule.num_stages)
        for kind in (F, B)
        for micro_batch in range(schedule.num_micro_batches)
    }
    counts = Counter(op for ops in schedule.operations for op in ops)
    wrong = [op for op in expected if counts[op] != 1] + [
        op for op, n in counts.items() if op not in expected and n != 1
    ]
    strangers = [op for op in counts if op.kind is not R and op not in expected]
    if wrong or strangers:
        op = sorted(wrong + strangers, key=str)[0]
        raise ScheduleError(f"operation {op} appears {counts[op]} times, once is right\n{format_schedule(schedule)}")
    for rank, ops in enumerate(schedule.operations):
        for index, op in enumerate(ops):
            if op.stage not in schedule.stages_of_rank[rank]:
                raise ScheduleError(f"{op} runs on rank {rank}, not its home\n{format_schedule(schedule, rank, index)}")
    _prove_progress(schedule)
    _prove_message_order(schedule)


def _prove_progress(schedule: Schedule) -> None:
    done: set[Operation] = set()
    needs = {op: predecessors(schedule, op) for ops in schedule.operations for op in ops}
    position = [0] * schedule.num_ranks
    while any(position[r] < len(ops) for r, ops in enumerate(schedule.operations)):
        moved = False
        for rank, ops in enumerate(schedule.operations):
            while position[rank] < len(ops) and all(p in done for p in needs[ops[position[rank]]]):
                done.add(ops[position[rank]])
                position[rank] += 1
                moved = True
        if not moved:
            rank = next(r for r, ops in enumerate(schedule.operations) if position[r] < len(ops))
            grid = format_schedule(schedule, rank, position[rank])
            raise ScheduleError(
                f"deadlock: {schedule.operations[rank][position[rank]]} on rank {rank} never starts\n{grid}"
            )


def _prove_message_order(schedule: Schedule) -> None:
    """Sends and receives between two neighbours go over one ordered channel a direction: orders must match."""
    for stage in range(1, schedule.num_stages):
        low, high = schedule.rank_of_stage[stage - 1], schedule.rank_of_stage[stage]
        if low == high:
            continue
        for kind, sender, receiver, source, target in (
            (F, low, high, stage - 1, stage),
            (B, high, low, stage, stage - 1),
        ):
            sent = [o.micro_batch for o in schedule.operations[sender] if o.kind is kind and o.stage == source]
            got = [o.micro_batch for o in schedule.operations[receiver] if o.kind is kind and o.stage == target]
            if sent != got:
                raise ScheduleError(
                    f"rank {sender} sends {kind.value} of micro-batches {sent}, rank {receiver} expects {got}\n"
                    f"{format_schedule(schedule)}"
                )


def max_stored_micro_batches(schedule: Schedule, stage: int) -> int:
    """Largest number of micro-batches between forward and backward pass on ``stage`` at any time."""
    stored = most = 0
    for op in schedule.operations[schedule.rank_of_stage[stage]]:
        if op.stage == stage and op.kind is not R:
            stored += 1 if op.kind is F else -1
            most = max(most, stored)
    return most


def format_schedule(schedule: Schedule, rank: int | None = None, index: int | None = None) -> str:
    """The grid, a line a rank; the operation at (rank, index) is marked with brackets."""
    lines = []
    for r, ops in enumerate(schedule.operations):
        cells = [f"[{op}]" if (r, i) == (rank, index) else str(op) for i, op in enumerate(ops)]
        lines.append(f"rank {r}: " + " ".join(cells))
    return "\n".join(lines)
