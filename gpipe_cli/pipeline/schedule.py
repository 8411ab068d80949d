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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
class Event:
    """When an operation ran, in seconds; measured by a runtime or predicted by a simulation."""

    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Schedule:
    """For every rank an ordered tuple of operations.

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


class ScheduleError(ValueError):
    """A schedule that cannot run: an operation missing or doubled, a deadlock, messages out of order."""


POLICIES = ("gpipe", "1f1b", "interleaved")
REMAT_MODES = ("full", "except_last", "none", "auto")

F, R, B = OperationKind.FORWARD, OperationKind.REMATERIALIZE, OperationKind.BACKWARD


def place_stages(num_stages: int, num_ranks: int, policy: str) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank: consecutive ones, as even as possible, or dealt in turn for "interleaved".

    Raises ValueError unless 1 <= num_ranks <= num_stages and, for "interleaved", every rank gets as many.
    """
    if not 1 <= num_ranks <= num_stages:
        raise ValueError(f"num_ranks={num_ranks}: {num_stages} stages need between 1 and {num_stages} ranks")
    if policy == "interleaved":
        if num_stages % num_ranks:
            raise ValueError(
                f"schedule=interleaved: {num_stages} stages cannot be dealt evenly to {num_ranks} ranks; "
                f"use a multiple of {num_ranks} partitions"
            )
        return tuple(tuple(range(rank, num_stages, num_ranks)) for rank in range(num_ranks))
    base, extra = divmod(num_stages, num_ranks)
    starts = [rank * base + min(rank, extra) for rank in range(num_ranks + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(starts))


def make_schedule(
    num_stages: int,
    num_micro_batches: int,
    policy: str = "gpipe",
    remat: str = "full",
    num_ranks: int | None = None,
    kept: Sequence[int] | None = None,
) -> Schedule:
    """The training schedule of one mini-batch.

    ``remat``: "full" recomputes every micro-batch whose backward pass does not follow its forward pass at once (there
    is nothing to save there: the activations are still needed); "except_last" also spares the last micro-batch, as
    torchgpipe does; "none" keeps all activations; "auto" recomputes only what is needed to hold the activations of at
    most ``kept[stage]`` micro-batches at any time. Raises ValueError naming the argument.
    """
    if policy not in POLICIES:
        raise ValueError(f"schedule={policy}: choose one of {', '.join(POLICIES)}")
    if remat not in REMAT_MODES:
        raise ValueError(f"remat={remat}: choose one of {', '.join(REMAT_MODES)}")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches={num_micro_batches}: give a whole number of 1 or more")
    if (remat == "auto") != (kept is not None):
        raise ValueError("kept belongs to remat=auto: give both or neither")
    if kept is not None and (len(kept) != num_stages or min(kept) < 1):
        raise ValueError(f"kept={list(kept)}: give one number of 1 or more for each of the {num_stages} stages")
    stages_of_rank = place_stages(num_stages, num_ranks if num_ranks is not None else num_stages, policy)
    order = {"gpipe": _fill_drain, "1f1b": _1f1b, "interleaved": _interleaved}[policy]
    bare = tuple(
        tuple(order(rank, len(stages_of_rank), stages, num_micro_batches)) for rank, stages in enumerate(stages_of_rank)
    )
    plain = Schedule(policy, remat, num_stages, num_micro_batches, stages_of_rank, bare)
    return replace(plain, operations=tuple(tuple(_with_rematerialization(plain, ops, kept)) for ops in bare))


def make_forward_schedule(num_micro_batches: int, stages_of_rank: tuple[tuple[int, ...], ...]) -> Schedule:
    """The schedule of an evaluation on stages placed so: forward passes only."""
    num_ranks = len(stages_of_rank)
    operations = tuple(
        tuple(
            Operation(stage, F, micro_batch)
            for group in _groups(num_micro_batches, num_ranks if _is_dealt(stages) else 1)
            for stage in stages
            for micro_batch in group
        )
        for stages in stages_of_rank
    )
    num_stages = sum(len(stages) for stages in stages_of_rank)
    return Schedule("forward", "none", num_stages, num_micro_batches, stages_of_rank, operations)


def _is_dealt(stages: tuple[int, ...]) -> bool:
    return len(stages) > 1 and stages[1] - stages[0] > 1


def _pass(kind: OperationKind, stages: Sequence[int], micro_batch: int) -> Iterable[Operation]:
    """A micro-batch through consecutive stages: forward in order, backward in reverse."""
    return (Operation(stage, kind, micro_batch) for stage in (stages if kind is F else reversed(stages)))


def _fill_drain(rank: int, num_ranks: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    del rank, num_ranks  # the order is the same on every rank
    for m in range(num_micro_batches):
        yield from _pass(F, stages, m)
    for m in reversed(range(num_micro_batches)):
        yield from _pass(B, stages, m)


def _1f1b(rank: int, num_ranks: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    num_ahead = min(num_micro_batches, num_ranks - 1 - rank)
    for m in range(num_ahead):
        yield from _pass(F, stages, m)
    for m in range(num_ahead, num_micro_batches):
        yield from _pass(F, stages, m)
        yield from _pass(B, stages, m - num_ahead)
    for m in range(num_micro_batches - num_ahead, num_micro_batches):
        yield from _pass(B, stages, m)


def _interleaved(rank: int, num_ranks: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    """One forward, one backward over stages that are dealt to the ranks in turn (Narayanan et al. 2021, section 2.2).

    Micro-batches go in groups of one per rank: a group passes a rank's first stage, then its second, and so on.
    """
    groups = _groups(num_micro_batches, num_ranks)
    forward = [Operation(stage, F, m) for group in groups for stage in stages for m in group]
    backward = [Operation(stage, B, m) for group in groups for stage in reversed(stages) for m in group]
    num_ahead = (num_ranks - rank - 1) * 2 + (len(stages) - 1) * num_ranks
    if num_micro_batches % num_ranks:  # a short last group breaks the even step: fill first, then drain
        num_ahead = len(forward)
    num_ahead = min(num_ahead, len(forward))
    yield from forward[:num_ahead]
    for ahead, behind in zip(forward[num_ahead:], backward, strict=False):
        yield ahead
        yield behind
    yield from backward[len(forward) - num_ahead :]


def _groups(num_micro_batches: int, size: int) -> list[range]:
    return [range(start, min(start + size, num_micro_batches)) for start in range(0, num_micro_batches, size)]


def _with_rematerialization(
    schedule: Schedule, operations: Sequence[Operation], kept: Sequence[int] | None
) -> Iterable[Operation]:
    previous: Operation | None = None
    last = schedule.num_micro_batches - 1
    spared: dict[int, frozenset[int]] = {}
    for op in operations:
        if op.kind is B and schedule.remat != "none":
            if kept is not None and op.stage not in spared:
                spared[op.stage] = _spared(schedule, op.stage, kept[op.stage])
            still_fresh = previous == Operation(op.stage, F, op.micro_batch)
            except_last = schedule.remat == "except_last" and op.micro_batch == last
            if not (still_fresh or except_last or op.micro_batch in spared.get(op.stage, ())):
                yield Operation(op.stage, R, op.micro_batch)
        yield op
        previous = op


def _spared(schedule: Schedule, stage: int, kept: int) -> frozenset[int]:
    """Micro-batches that ``stage`` can keep when it may hold the activations of ``kept`` at any time."""
    num_micro_batches = schedule.num_micro_batches
    if kept >= max_stored_micro_batches(schedule, stage):
        return frozenset(range(num_micro_batches))
    if schedule.policy == "gpipe":
        # The last ones, whose backward passes come first: they are gone when the first recomputation needs room.
        one_stage = len(schedule.stages_of_rank[schedule.rank_of_stage[stage]]) == 1
        return frozenset(range(num_micro_batches - (kept if one_stage else kept - 1), num_micro_batches))
    # Any so many consecutive micro-batches are in flight together; one place stays for the one being recomputed.
    in_flight = max_stored_micro_batches(schedule, stage)
    return frozenset(m for m in range(num_micro_batches) if m % in_flight < kept - 1)


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
    """Sends and receives between two ranks go over one ordered channel a direction and kind: orders must match."""
    for kind, step in ((F, 1), (B, -1)):
        for sender, receiver in sorted({(a, b) for a, b in _boundaries(schedule, step)}):
            sent = messages(schedule, sender, receiver, kind)
            got = [
                (o.stage, o.micro_batch)
                for o in schedule.operations[receiver]
                if o.kind is kind
                and 0 <= o.stage - step < schedule.num_stages
                and schedule.rank_of_stage[o.stage - step] == sender
            ]
            if sent != got:
                raise ScheduleError(
                    f"rank {sender} sends {kind.value} of (stage, micro-batch) {sent}, rank {receiver} expects {got}\n"
                    f"{format_schedule(schedule)}"
                )


def _boundaries(schedule: Schedule, step: int) -> Iterable[tuple[int, int]]:
    homes = schedule.rank_of_stage
    for stage in range(schedule.num_stages):
        if 0 <= stage + step < schedule.num_stages and homes[stage] != homes[stage + step]:
            yield homes[stage], homes[stage + step]


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

    A backward pass counts as two forward passes: it computes the gradients of inputs and of weights.
    """
    unit = {F: 1, R: 1, B: 2}
    work = Counter[int]()
    for ops in schedule.operations:
        for op in ops:
            work[op.stage] += unit[op.kind]
    return tuple(work[stage] / (3 * schedule.num_micro_batches) for stage in range(schedule.num_stages))


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
