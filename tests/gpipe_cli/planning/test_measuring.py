"""Measured times in place of predicted ones."""

from __future__ import annotations

import pytest

from gpipe_cli.pipeline.policies import make_schedule
from gpipe_cli.pipeline.simulate import StageCost, simulate
from gpipe_cli.planning.measuring import costs_between, costs_of_events
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


def test_what_did_not_run_keeps_its_time():
    events = simulate(make_schedule(1, 2, "gpipe", "none"), [StageCost(1.0, 2.0)]).events
    assert costs_of_events(events, [StageCost(0.0, 0.0, rematerialize_s=9.0)])[0].rematerialize_s == 9.0


def test_one_slow_operation_does_not_count():
    schedule = make_schedule(1, 5, "gpipe", "none")
    events = [list(simulate(schedule, [StageCost(1.0, 2.0)]).events[0])]
    first = events[0][0]
    events[0][0] = type(first)(first.operation, first.start_s - 100, first.end_s)
    assert costs_of_events(events, [StageCost(0.0, 0.0)])[0].forward_s == 1.0


def test_two_sizes_give_the_fixed_part_and_the_part_per_sample():
    def costs(num_samples: int) -> list[StageCost]:
        return [StageCost(1.0 + 2.0 * num_samples, 3.0 * num_samples, input_bytes=10 * num_samples)]

    (found,) = costs_between(costs(2), 2, costs(8), 8, 4)
    assert (found.forward_s, found.backward_s, found.input_bytes) == (pytest.approx(9), pytest.approx(12), 40)
    with pytest.raises(ValueError, match="both are 2"):
        costs_between(costs(2), 2, costs(2), 2, 4)


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
