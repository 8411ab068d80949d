"""Predicted times and memory: exact where the inputs are, and as the runtime would run the same operations."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from gpipe_cli.pipeline.policies import cut_weights, make_schedule
from gpipe_cli.pipeline.schedule import OperationKind, max_stored_micro_batches, predecessors
from gpipe_cli.pipeline.simulate import StageCost, simulate
from gpipe_cli.pipeline.sizes import split_sizes

THIRD = Fraction(1, 3)


def equal(num_stages: int, forward=THIRD, backward=Fraction(2, 7), **more) -> list[StageCost]:
    return [StageCost(forward, backward, **more)] * num_stages


@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 8, 32, 64])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_equal_stages_have_exactly_the_papers_bubble(num_stages, num_micro_batches, policy):
    simulation = simulate(make_schedule(num_stages, num_micro_batches, policy, "none"), equal(num_stages))
    assert simulation.bubble_fraction == Fraction(num_stages - 1, num_micro_batches + num_stages - 1)
    assert simulation.step_time_s == (num_micro_batches + num_stages - 1) * (THIRD + Fraction(2, 7))


def test_whole_seconds_give_the_bubble_as_a_correctly_rounded_number():
    assert simulate(make_schedule(4, 9, "gpipe", "none"), equal(4, 1, 2)).bubble_fraction == 3 / 12


def test_interleaving_shortens_the_bubble_by_the_number_of_stages_a_rank_hosts():
    plain = simulate(make_schedule(2, 8, "1f1b", "none"), equal(2, 2, 4))
    dealt = simulate(make_schedule(4, 8, "interleaved", "none", num_ranks=2), equal(4, 1, 2))
    assert plain.bubble_fraction == pytest.approx(1 / 9)
    assert dealt.step_time_s < plain.step_time_s


def shared_out(schedule, work: float) -> list[StageCost]:
    """Stages whose costs are as their weights in a cut want them; all forward passes take `work` together."""
    shares = [1 / weight for weight in cut_weights(schedule)]
    return [StageCost(work * share / sum(shares), 2 * work * share / sum(shares)) for share in shares]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 8), (3, 12), (4, 16), (8, 32)])
def test_going_ahead_with_the_cut_for_it_saves_a_third_of_what_the_bubble_costs(stages, micro_batches):
    def step_time_s(policy: str) -> float:
        schedule = make_schedule(stages, micro_batches, policy, "none")
        return simulate(schedule, shared_out(schedule, 1.0)).step_time_s

    without_bubble = 3 * micro_batches / stages
    assert step_time_s("1f1b") / without_bubble - 1 == pytest.approx((stages - 1) / micro_batches)
    assert step_time_s("eager_1f1b") / without_bubble - 1 < 0.7 * (stages - 1) / micro_batches


@pytest.mark.parametrize("transfer_s", [Fraction(0), Fraction(1, 5)])
@pytest.mark.parametrize("stages", range(2, 9))
def test_zero_bubble_saves_half_of_the_bubble_and_holds_what_going_ahead_does(stages, transfer_s):
    for micro_batches in (2 * stages, 3 * stages + 1, 6 * stages):
        costs = equal(stages, Fraction(1), Fraction(2), transfer_s=transfer_s)
        plain, ahead, zero = (
            simulate(make_schedule(stages, micro_batches, policy, "none"), costs)
            for policy in ("1f1b", "eager_1f1b", "zero_bubble")
        )
        assert zero.step_time_s - 3 * micro_batches <= (plain.step_time_s - 3 * micro_batches) / 2
        assert zero.busy_s == plain.busy_s
        assert max(zero.peak_stored_micro_batches) == max(ahead.peak_stored_micro_batches)
    assert stages > 2 or transfer_s or zero.step_time_s == 3 * micro_batches + 1


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 8), (3, 12), (4, 16), (4, 32), (8, 32)])
def test_tapered_micro_batches_save_a_fifth_of_the_bubble_or_more(stages, micro_batches):
    samples = 60 * micro_batches

    def bubble_s(tapered: bool) -> float:
        sizes = split_sizes(samples, micro_batches, tapered)
        schedule = make_schedule(stages, micro_batches, "eager_1f1b", "none")
        costs = [equal(stages, Fraction(size, 60), Fraction(2 * size, 60)) for size in sizes]
        return simulate(schedule, costs).step_time_s - 3 * micro_batches

    assert bubble_s(tapered=False) == 3 * (stages - 1)
    assert bubble_s(tapered=True) < 0.78 * bubble_s(tapered=False)


def test_micro_batches_may_have_costs_of_their_own():
    schedule = make_schedule(2, 3, "gpipe", "none")
    even = equal(2, 1, 2, input_bytes=1, activation_bytes=10)
    assert simulate(schedule, [even] * 3) == simulate(schedule, even)
    large = equal(2, 3, 6, input_bytes=3, activation_bytes=30)
    found = simulate(schedule, [even, large, even])
    assert [event.end_s - event.start_s for event in found.events[0][:3]] == [1, 3, 1]
    assert found.peak_activation_bytes == (55, 55)
    with pytest.raises(ValueError, match="costs of 2 micro-batches, not 3"):
        simulate(schedule, [even] * 2)
    with pytest.raises(ValueError, match="3 costs for 2 stages"):
        simulate(schedule, [equal(3, 1, 2)] * 3)


def test_zero_bubble_with_rematerialization_holds_the_activations_of_one_and_still_saves_time():
    costs = equal(4, Fraction(1), Fraction(2), input_bytes=1, activation_bytes=100)
    ahead, zero = (simulate(make_schedule(4, 8, policy, "full"), costs) for policy in ("eager_1f1b", "zero_bubble"))
    assert zero.peak_activation_bytes == ahead.peak_activation_bytes
    assert zero.step_time_s < ahead.step_time_s


def test_the_gradients_of_weights_take_what_they_are_said_to():
    schedule = make_schedule(2, 2, "zero_bubble", "none")
    (_, last) = simulate(schedule, [StageCost(1, 4), StageCost(1, 4, weights_s=3)]).events
    assert [(str(event.operation), event.end_s - event.start_s) for event in last] == [
        ("1F0", 1), ("1B0", 1), ("1F1", 1), ("1B1", 1), ("1W0", 3), ("1W1", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_with_two_ranks_the_first_works_all_the_time(micro_batches, remat):
    schedule = make_schedule(2, micro_batches, "eager_1f1b", remat)
    simulation = simulate(schedule, shared_out(schedule, 1.0))
    assert simulation.busy_s[0] == pytest.approx(simulation.step_time_s)


@pytest.mark.parametrize("remat", ["full", "except_last", "none"])
@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"])
def test_an_operation_starts_when_its_rank_is_free_and_all_it_needs_has_arrived(policy, remat):
    costs = [StageCost(1 + k, 3 + k % 2, transfer_s=k + 2) for k in range(4)]
    schedule = make_schedule(4, 6, policy, remat, num_ranks=3)
    simulation = simulate(schedule, costs)
    end = {event.operation: event.end_s for ran in simulation.events for event in ran}
    for rank, ran in enumerate(simulation.events):
        assert tuple(event.operation for event in ran) == schedule.operations[rank]
        free = 0
        for event in ran:
            needs = predecessors(schedule, event.operation)
            assert event.start_s >= max([free, *(end[need] for need in needs)])
            op = event.operation
            deferred = (op.stage, op.micro_batch) in schedule.deferred
            assert event.end_s - event.start_s == costs[op.stage].seconds(op.kind, deferred)
            away = [need for need in needs if schedule.rank_of_stage[need.stage] != rank]
            for need in away:
                assert event.start_s >= end[need] + costs[min(need.stage, event.operation.stage)].transfer_s
            if not away:
                assert event.start_s == max([free, *(end[need] for need in needs)])
            free = event.end_s


def test_recomputation_fills_the_wait_for_the_gradient():
    """The first rank recomputes micro-batch 0 while the second is at its gradient: no time lost (paper, 2.3)."""
    with_it = simulate(make_schedule(2, 2, "1f1b", "full"), equal(2, 1, 2))
    without = simulate(make_schedule(2, 2, "1f1b", "none"), equal(2, 1, 2))
    assert with_it.step_time_s == without.step_time_s == 9
    assert with_it.busy_s[0] == without.busy_s[0] + 2
    assert with_it.bubble_fraction < without.bubble_fraction


def test_recomputation_costs_a_forward_pass_a_micro_batch_where_nothing_waits():
    assert simulate(make_schedule(1, 4, "gpipe", "full"), equal(1, 1, 2)).step_time_s == 4 * 3 + 3
    quicker = equal(1, 1, 2, rematerialize_s=Fraction(1, 2))
    assert simulate(make_schedule(1, 4, "gpipe", "full"), quicker).step_time_s == 4 * 3 + Fraction(3, 2)


def test_transfers_delay_and_queue_but_stages_of_one_rank_hand_over_for_nothing():
    costs = equal(2, 1, 1, transfer_s=5)
    assert simulate(make_schedule(2, 1, "gpipe", "none"), costs).step_time_s == 4 + 10
    # Three outputs ready at 1, 2, 3 over a link that takes 5 each arrive at 6, 11, 16.
    second = simulate(make_schedule(2, 3, "gpipe", "none"), costs).events[1]
    assert [event.start_s for event in second[:3]] == [6, 11, 16]
    assert simulate(make_schedule(2, 1, "gpipe", "none", num_ranks=1), costs).step_time_s == 4


def test_the_update_comes_once_after_the_last_operation():
    assert simulate(make_schedule(1, 4, "gpipe", "none"), equal(1, 1, 2, update_s=7)).step_time_s == 4 * 3 + 7


def test_the_bubble_counts_waiting_only():
    simulation = simulate(make_schedule(2, 2, "gpipe", "none"), equal(2, 1, 2, update_s=3))
    idle = 2 * simulation.step_time_s - sum(simulation.busy_s)
    assert simulation.bubble_fraction == idle / (2 * simulation.step_time_s)


@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_memory_without_rematerialization_is_that_of_the_stored_micro_batches(num_micro_batches, policy):
    schedule = make_schedule(4, num_micro_batches, policy, "none")
    costs = equal(4, input_bytes=10, activation_bytes=100, saved_bytes=105)
    if policy == "zero_bubble":  # as much as before the gradients of inputs left
        costs = [replace(cost, waiting_bytes=110, saved_bytes=110) for cost in costs]
    simulation = simulate(schedule, costs)
    stored = tuple(max_stored_micro_batches(schedule, stage) for stage in range(4))
    assert simulation.peak_stored_micro_batches == stored
    assert simulation.peak_activation_bytes == tuple(110 * n for n in stored)
    assert simulation.peak_saved_bytes == tuple(costs[0].saved_bytes * n for n in stored)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
def test_full_rematerialization_holds_inputs_and_the_activations_of_one(num_micro_batches):
    costs = equal(2, input_bytes=10, activation_bytes=100, saved_bytes=105)
    simulation = simulate(make_schedule(2, num_micro_batches, "gpipe", "full"), costs)
    assert simulation.peak_activation_bytes == (10 * num_micro_batches + 100,) * 2
    assert simulation.peak_saved_bytes == (105,) * 2


def test_1f1b_stores_no_more_micro_batches_than_stages():
    simulation = simulate(make_schedule(8, 64, "1f1b", "none"), equal(8))
    assert simulation.peak_stored_micro_batches == tuple(8 - rank for rank in range(8))


def test_events_do_not_overlap_and_are_those_of_the_schedule():
    for ran in simulate(make_schedule(3, 5, "1f1b", "full"), equal(3)).events:
        assert all(one.end_s <= other.start_s for one, other in pairwise(ran))
        assert {event.operation.kind for event in ran} <= set(OperationKind)


def test_another_number_of_costs_is_refused():
    with pytest.raises(ValueError, match="3 costs for 2 stages"):
        simulate(make_schedule(2, 2), equal(3))
