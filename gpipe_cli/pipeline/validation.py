"""The proof that a schedule runs: every operation once and at home, no deadlock, messages in order. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .schedule import B, F, Operation, R, Schedule, W, format_schedule, messages, predecessors


class ScheduleError(ValueError):
    """A schedule that cannot run: an operation missing or doubled, a deadlock, messages out of order."""


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
    strangers = [op for op in counts if op.kind not in (R, W) and op not in expected]
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
