"""Measured times in place of predicted ones."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from gpipe_cli.compose import load
from gpipe_cli.pipeline.policies import make_schedule
from gpipe_cli.pipeline.simulate import StageCost, simulate
from gpipe_cli.planning import measuring
from gpipe_cli.planning.measuring import costs_of_events
from gpipe_cli.planning.network import make_planner


def test_costs_of_events_give_the_step_that_they_come_from():
    costs = (StageCost(1.0, 2.0, rematerialize_s=1.5, transfer_s=0.25), StageCost(3.0, 5.0, rematerialize_s=2.5))
    schedule = make_schedule(2, 4, "gpipe", "full")
    events = simulate(schedule, costs).events
    guesses = tuple(StageCost(0.0, 0.0, transfer_s=cost.transfer_s, input_bytes=7) for cost in costs)
    found = costs_of_events(events, guesses)
    assert [(cost.forward_s, cost.backward_s, cost.rematerialize_s) for cost in found] == [(1, 2, 1.5), (3, 5, 2.5)]
    assert all(cost.input_bytes == 7 for cost in found)
    assert simulate(schedule, found).step_time_s == simulate(schedule, costs).step_time_s


def test_backward_passes_in_two_halves_are_told_from_whole_ones():
    costs = (StageCost(1.0, 4.0), StageCost(2.0, 5.0, weights_s=2.0))
    for micro_batches in (2, 6):  # with two, the last stage runs no whole one
        schedule = make_schedule(2, micro_batches, "zero_bubble", "none")
        events = simulate(schedule, costs).events
        found = costs_of_events(events, (StageCost(0.0, 0.0),) * 2)
        assert [(cost.backward_s, cost.weights_s) for cost in found] == [(4.0, None), (5.0, 2.0)]


def test_what_did_not_run_keeps_its_time():
    events = simulate(make_schedule(1, 2, "gpipe", "none"), [StageCost(1.0, 2.0)]).events
    assert costs_of_events(events, [StageCost(0.0, 0.0, rematerialize_s=9.0)])[0].rematerialize_s == 9.0


def test_one_slow_operation_does_not_count():
    schedule = make_schedule(1, 5, "gpipe", "none")
    events = [list(simulate(schedule, [StageCost(1.0, 2.0)]).events[0])]
    first = events[0][0]
    events[0][0] = type(first)(first.operation, first.start_s - 100, first.end_s)
    assert costs_of_events(events, [StageCost(0.0, 0.0)])[0].forward_s == 1.0


def test_cut_time_plans_by_the_clock(plan_config, monkeypatch):
    seconds = (6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0)
    monkeypatch.setattr("gpipe_cli.planning.measuring.measure_layers", lambda layers, sample, device: seconds)
    numbers = (
        "memory_gb=24", "fp32_tflops=1", "memory_gb_per_s=100", "link_gb_per_s=10", "link_latency_us=1",
        "op_overhead_us=5",
    )  # fmt: skip
    config = plan_config("hardware=cpu", "partitions=2", "micro_batches=4", "cut=time", "remat=none")
    planner = make_planner(config)
    monkeypatch.setattr(planner, "hardware", lambda ranks: given(config, numbers))
    plan = planner.evaluate(planner.first_choice())
    assert plan.balance == (2, 5)  # 11 and 10: CASES 77
    first = plan.stages[0].cost
    assert first.forward_s + first.backward_s == pytest.approx(11.0)
    assert first.forward_s < first.backward_s


def given(config, numbers):
    import dataclasses

    from gpipe_cli.planning.hardware import described

    values = {name: float(value) for name, value in (number.split("=") for number in numbers)}
    return described(dataclasses.replace(config.hardware, **values), "fp32")


def test_measuring_layers_runs_them_on_this_machine(plan_config):
    from gpipe_cli.planning.measuring import measured_layers

    config = plan_config("hardware=cpu", "model.layers=2")
    planner = make_planner(config)
    seconds = measured_layers(config, planner._layers, 2, 2)
    assert len(seconds) == planner.num_layers
    assert min(seconds) > 0


SLOW_NETWORK = """
    import time
    from functools import partial
    from torch import nn

    class Slow(nn.Linear):
        def forward(self, value):
            time.sleep(0.05)
            return super().forward(value)

    def layers(num_classes):
        return [("flat", nn.Flatten), ("slow", partial(Slow, 192, 8)), ("head", partial(nn.Linear, 8, num_classes))]
"""


@pytest.fixture
def slow_plan(tmp_path: Path, monkeypatch):
    """The configuration and the plan, by counted operations, of a network whose second layer sleeps for 50 ms."""
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW_NETWORK))
    monkeypatch.syspath_prepend(tmp_path)

    def make(*words: str):
        settings = ("model=module", "model.factory=slow:layers", "image_size=8", "num_classes=4", "batch_size=16")
        fixed = ("hardware=cpu", "threads=1", "partitions=2", "micro_batches=8", "balance=[2,1]")
        config = load("plan", [*settings, *fixed, *words])
        planner = make_planner(config)
        return config, planner.evaluate(planner.first_choice())

    return make


@pytest.mark.parametrize(("remat", "num_passes"), [("none", 8), ("full", 8 + 7)])
def test_stages_take_what_they_take_in_a_pipeline(slow_plan, monkeypatch, remat, num_passes):
    monkeypatch.setattr(measuring, "available_cores", lambda: 2)
    config, counted = slow_plan(f"remat={remat}")
    assert counted.simulation.step_time_s < 0.25
    plan = measuring.with_measured_stages(config, counted)
    assert plan.is_timed
    slow, head = (stage.cost for stage in plan.stages)
    assert 0.05 <= slow.forward_s < 0.1
    assert 0 < slow.backward_s < slow.forward_s
    assert 0 < head.forward_s < slow.forward_s
    assert min(slow.update_s, head.update_s) > 0
    # Eight micro-batches, seven of which the first stage computes again: what was not measured is simulated.
    assert num_passes * 0.05 <= plan.simulation.step_time_s < 2 * num_passes * 0.05
    assert plan.memory_bytes_per_rank == counted.memory_bytes_per_rank


def test_tapered_micro_batches_take_what_the_timed_one_did_in_proportion(slow_plan, monkeypatch):
    monkeypatch.setattr(measuring, "available_cores", lambda: 2)
    config, counted = slow_plan("remat=none", "taper=true", "batch_size=32")
    plan = measuring.with_measured_stages(config, counted)
    assert plan.sizes == (2, 4, 6, 6, 5, 4, 3, 2)
    for stage, (before, after) in enumerate(zip(counted.stages, plan.stages, strict=True)):
        assert [of_all[stage] for of_all in plan.costs][2:4] == [after.cost] * 2
        factor = after.cost.forward_s / before.cost.forward_s
        first, first_before = plan.costs[0][stage], counted.costs[0][stage]
        assert first.forward_s == pytest.approx(factor * first_before.forward_s)
        assert first.backward_s < after.cost.backward_s
        assert first.update_s == after.cost.update_s
        assert first.activation_bytes == first_before.activation_bytes
    assert plan.simulation == simulate(plan.schedule, plan.costs)


def test_ranks_without_a_core_of_their_own_are_not_timed(slow_plan, monkeypatch):
    monkeypatch.setattr(measuring, "available_cores", lambda: 1)
    config, counted = slow_plan()
    assert measuring.with_measured_stages(config, counted) is counted
