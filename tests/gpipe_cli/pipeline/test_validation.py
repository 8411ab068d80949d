"""The validator accepts every schedule of ours, and shows where one that was broken is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from gpipe_cli.pipeline import POLICIES, REMAT_MODES, Operation, ScheduleError, make_schedule, validate_schedule


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("remat", REMAT_MODES)
def test_every_schedule_up_to_eight_stages_and_64_micro_batches_is_valid(policy, remat):
    for stages in range(1, 9):
        for micro_batches in (*range(1, 10), 16, 31, 64):
            for ranks in {1, (stages + 1) // 2, stages}:
                if policy == "interleaved" and stages % ranks:
                    continue
                for kept in [None] if remat != "auto" else [[0] * stages, [2] * stages, [micro_batches] * stages]:
                    schedule = make_schedule(stages, micro_batches, policy, remat, ranks, kept)
                    validate_schedule(schedule)


def changed(schedule, rank: int, operations: list[Operation]):
    everything = list(schedule.operations)
    everything[rank] = tuple(operations)
    return dataclasses.replace(schedule, operations=tuple(everything))


def test_a_missing_a_doubled_and_a_misplaced_operation_are_found():
    schedule = make_schedule(2, 2, "gpipe", "none")
    ops = list(schedule.operations[0])
    with pytest.raises(ScheduleError, match="operation 0F1 appears 0 times"):
        validate_schedule(changed(schedule, 0, [ops[0], *ops[2:]]))
    with pytest.raises(ScheduleError, match="operation 0F0 appears 2 times"):
        validate_schedule(changed(schedule, 0, [ops[0], *ops]))
    swapped = dataclasses.replace(schedule, operations=schedule.operations[::-1])
    with pytest.raises(ScheduleError, match="1F0 runs on rank 0, not its home"):
        validate_schedule(swapped)


def test_gradients_of_weights_come_once_and_after_those_of_inputs():
    schedule = make_schedule(2, 2, "zero_bubble", "none")
    ops = list(schedule.operations[1])
    with pytest.raises(ScheduleError, match="operation 1W1 appears 2 times"):
        validate_schedule(changed(schedule, 1, [*ops, ops[-1]]))
    with pytest.raises(ScheduleError, match=r"(?s)deadlock: .*1W1 1F0"):
        validate_schedule(changed(schedule, 1, [ops[-1], *ops[:-1]]))


def test_a_deadlock_is_shown_in_the_grid():
    schedule = make_schedule(2, 2, "gpipe", "none")
    ops = list(schedule.operations[0])
    with pytest.raises(ScheduleError, match=r"(?s)deadlock: 0B1 on rank 0 never starts.*\[0B1\]"):
        validate_schedule(changed(schedule, 0, [ops[0], ops[2], ops[1], ops[3]]))


def test_messages_that_would_be_taken_for_each_other_are_found():
    schedule = make_schedule(2, 2, "gpipe", "none")
    ops = list(schedule.operations[1])
    with pytest.raises(
        ScheduleError, match=r"rank 0 sends F of .* \[\(1, 0\), \(1, 1\)\], rank 1 expects \[\(1, 1\), \(1, 0\)\]"
    ):
        validate_schedule(changed(schedule, 1, [ops[1], ops[0], ops[2], ops[3]]))
