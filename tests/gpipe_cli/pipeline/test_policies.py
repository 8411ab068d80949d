"""The orders that policies make: literal ones, and what holds for many sizes."""

from __future__ import annotations

import pytest

from gpipe_cli.pipeline.policies import cut_weights, make_forward_schedule, make_schedule, place_stages
from gpipe_cli.pipeline.schedule import max_stored_micro_batches, stage_weights


def grid(schedule) -> list[str]:
    return [" ".join(str(op) for op in ops) for ops in schedule.operations]


def test_fill_drain_runs_all_forward_passes_then_backward_passes_in_reverse():
    assert grid(make_schedule(3, 3, "gpipe", "none")) == [
        "0F0 0F1 0F2 0B2 0B1 0B0",
        "1F0 1F1 1F2 1B2 1B1 1B0",
        "2F0 2F1 2F2 2B2 2B1 2B0",
    ]


def test_one_forward_one_backward_starts_backward_passes_early():
    assert grid(make_schedule(3, 4, "1f1b", "none")) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_eager_goes_as_far_ahead_as_the_first_gradient_takes_to_come_back():
    assert grid(make_schedule(2, 6, "eager_1f1b", "none")) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5",
    ]
    deep = make_schedule(4, 32, "eager_1f1b", "none")
    assert [max_stored_micro_batches(deep, stage) for stage in range(4)] == [10, 7, 4, 1]
    assert grid(make_schedule(4, 2, "eager_1f1b", "none"))[0] == "0F0 0F1 0B0 0B1"


def test_zero_bubble_leaves_the_gradients_of_weights_to_the_end_where_others_wait():
    assert grid(make_schedule(2, 5, "zero_bubble", "none")) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1W2 1W3 1W4",
    ]
    assert grid(make_schedule(3, 2, "zero_bubble", "none"))[1] == "1F0 1F1 1B0 1B1 1W0 1W1"
    deep = make_schedule(4, 32, "zero_bubble", "none")
    assert [max_stored_micro_batches(deep, stage) for stage in range(4)] == [10, 7, 6, 9]
    assert grid(make_schedule(2, 3, "zero_bubble", "none", 1)) == grid(make_schedule(2, 3, "eager_1f1b", "none", 1))


def test_deferred_gradients_of_weights_hold_no_more_activations_than_asked():
    assert grid(make_schedule(2, 3, "zero_bubble", "full")) == [
        "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2", "1F0 1B0 1W0 1F1 1B1 1W1 1F2 1B2 1W2",
    ]  # fmt: skip
    assert grid(make_schedule(2, 3, "zero_bubble", "auto", kept=[3, 2]))[1] == "1F0 1B0 1F1 1B1 1W1 1F2 1B2 1W2 1W0"
    assert grid(make_schedule(2, 2, "zero_bubble", "except_last"))[1] == "1F0 1B0 1W0 1F1 1B1 1W1"


def test_a_cut_gives_earlier_ranks_more_where_the_first_never_waits():
    assert cut_weights(make_schedule(2, 8, "eager_1f1b", "none")) == pytest.approx((1, 8 / 7))
    assert cut_weights(make_schedule(3, 8, "eager_1f1b", "none")) == pytest.approx((1, 8 / 7, 64 / 49))
    # The first stage recomputes: its forward and backward pass are three quarters of its work.
    assert cut_weights(make_schedule(2, 8, "eager_1f1b", "full")) == pytest.approx((4 / 3, 32 / 29))
    # Two ranks of two stages each, alike within a rank.
    assert cut_weights(make_schedule(4, 8, "eager_1f1b", "none", 2)) == pytest.approx((1, 1, 8 / 7, 8 / 7))
    for even in (make_schedule(3, 5, "eager_1f1b"), make_schedule(3, 8, "1f1b"), make_schedule(3, 8, "gpipe")):
        assert cut_weights(even) == stage_weights(even)


def test_full_rematerialization_recomputes_all_but_what_is_still_fresh():
    assert grid(make_schedule(2, 3, "gpipe", "full")) == [
        "0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0",
        "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0",
    ]
    assert grid(make_schedule(2, 2, "1f1b", "full")) == ["0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1B0 1F1 1B1"]


def test_except_last_spares_the_last_micro_batch():
    assert grid(make_schedule(2, 2, "1f1b", "except_last")) == ["0F0 0F1 0R0 0B0 0B1", "1F0 1B0 1F1 1B1"]
    several = "0F0 1F0 0F1 1F1 1B1 {}0B1 1R0 1B0 0R0 0B0"
    assert grid(make_schedule(2, 2, "gpipe", "except_last", 1)) == [several.format("")]
    assert grid(make_schedule(2, 2, "gpipe", "full", 1)) == [several.format("0R1 ")]


def test_interleaved_deals_the_stages_and_runs_groups_of_micro_batches_through_them():
    schedule = make_schedule(4, 4, "interleaved", "none", num_ranks=2)
    assert schedule.stages_of_rank == ((0, 2), (1, 3))
    assert grid(schedule) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]
    with pytest.raises(ValueError, match="schedule=interleaved: 3 stages cannot be dealt evenly to 2 ranks"):
        make_schedule(3, 4, "interleaved", num_ranks=2)


def stored_activations(schedule, stage: int) -> int:
    """Most micro-batches whose activations the stage holds at once."""
    held, most = set(), 0
    for op in schedule.operations[schedule.rank_of_stage[stage]]:
        if op.stage == stage:
            fresh = op.kind.value == "F" and (stage, op.micro_batch) not in schedule.rematerialized
            if fresh or op.kind.value == "R":
                held.add(op.micro_batch)
            most = max(most, len(held))
            if op.kind.value == ("W" if (stage, op.micro_batch) in schedule.deferred else "B"):
                held.discard(op.micro_batch)
    return most


@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "eager_1f1b", "zero_bubble", "interleaved"])
def test_automatic_rematerialization_keeps_what_fits_and_recomputes_only_the_rest(policy):
    for stages, micro_batches in [(1, 4), (2, 8), (4, 8), (3, 7)]:
        counts = []
        for kept in range(1, micro_batches + 1):
            schedule = make_schedule(stages, micro_batches, policy, "auto", kept=[kept] * stages)
            assert all(stored_activations(schedule, stage) <= kept for stage in range(stages))
            counts.append(len(schedule.rematerialized))
        assert counts == sorted(counts, reverse=True)
        assert counts[0] <= len(make_schedule(stages, micro_batches, policy, "full").rematerialized)
        assert counts[-1] == 0
    with pytest.raises(ValueError, match=r"kept=\[-1\]: give one number of 0 or more for each of the 1 stages"):
        make_schedule(1, 4, "gpipe", "auto", kept=[-1])
    with pytest.raises(ValueError, match="kept belongs to remat=auto"):
        make_schedule(1, 4, "gpipe", "auto")


def test_what_is_kept_is_spared_where_it_can_be_gone_in_time():
    # Fill-drain: the last ones, whatever else the rank hosts; 0 is as "full".
    several = "0F0 1F0 0F1 1F1 0F2 1F2 1B2 {}0B2 {}1B1 {}0B1 1R0 1B0 0R0 0B0"
    assert grid(make_schedule(2, 3, "gpipe", "auto", 1, [0, 2])) == [several.format("0R2 ", "", "0R1 ")]
    assert grid(make_schedule(2, 3, "gpipe", "auto", 1, [1, 0])) == [several.format("", "1R1 ", "0R1 ")]
    # In turn: one place stays for what is recomputed ...
    in_turn = "0F0 0F1 0F2 0B0 0F3 0R1 0B1 0F4 0R2 0B2 0F5 0B3 0R4 0B4 0R5 0B5"
    assert grid(make_schedule(3, 6, "1f1b", "auto", kept=[2, 1, 1]))[0] == in_turn
    # ... unless all that are kept are gone by then.
    assert grid(make_schedule(3, 3, "1f1b", "auto", kept=[2, 1, 1]))[0] == "0F0 0F1 0F2 0B0 0B1 0R2 0B2"


def test_a_rank_with_several_stages_runs_them_in_order_and_back():
    schedule = make_schedule(4, 2, "gpipe", "none", num_ranks=2)
    assert schedule.stages_of_rank == ((0, 1), (2, 3))
    assert grid(schedule)[1] == "2F0 3F0 2F1 3F1 3B1 2B1 3B0 2B0"


def test_stages_are_spread_evenly_over_fewer_ranks():
    assert place_stages(5, 2, "gpipe") == ((0, 1, 2), (3, 4))
    with pytest.raises(ValueError, match="num_ranks=6"):
        place_stages(5, 6, "gpipe")


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 64])
def test_one_forward_one_backward_stores_at_most_as_many_micro_batches_as_stages(micro_batches):
    for stages in range(1, 9):
        schedule = make_schedule(stages, micro_batches, "1f1b")
        assert max(max_stored_micro_batches(schedule, stage) for stage in range(stages)) <= stages
        fill_drain = make_schedule(stages, micro_batches, "gpipe")
        assert max_stored_micro_batches(fill_drain, 0) == micro_batches


def test_a_forward_schedule_has_every_micro_batch_on_every_stage_once():
    assert grid(make_forward_schedule(2, ((0, 1), (2,)))) == ["0F0 1F0 0F1 1F1", "2F0 2F1"]
    assert grid(make_forward_schedule(2, ((0, 2), (1, 3)))) == ["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"]
