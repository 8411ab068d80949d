"""Times measured on this machine, for plans that start from the clock instead of counted operations (cut=time).

First the layers alone, which gives the cut. Then the stages of that cut, each in its rank, in a few short steps of the
pipeline itself: ranks that compute beside each other share the memory's bandwidth, what a pass reads has left the
caches since it was written, and a result is copied before it is sent. A layer alone shows nothing of that.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gpipe_cli.distributed.devices import available_cores
from gpipe_cli.distributed.heap import keep_freed_memory
from gpipe_cli.distributed.launch import RankContext, launch
from gpipe_cli.pipeline import Layers, Pipeline
from gpipe_cli.pipeline.profile import measure_layers
from gpipe_cli.pipeline.schedule import B, Event, F, OperationKind, R, W, deferred_in
from gpipe_cli.pipeline.simulate import StageCost, simulate
from gpipe_cli.planning.cpu import cpu_ranks, threads_of_rank
from gpipe_cli.planning.network import layers_of, loss_of, mini_batch_of, sample_of
from gpipe_cli.training.networks import tied_parameters
from gpipe_cli.training.optimizer import build_optimizer

if TYPE_CHECKING:
    from gpipe_cli.config_plan import PlanConfig
    from gpipe_cli.planning.planner import Plan

NUM_MICRO_BATCHES = 4  # enough for passes whose neighbours are busy too
NUM_WARMUP_STEPS = 2
MEASURED_S = 3.0  # short steps are many, ...
FEWEST_STEPS = 5  # ... long ones at least so many


def measured_layers(config: PlanConfig, layers: Layers, num_samples: int, ranks: int) -> tuple[float, ...]:
    """Seconds of each layer's forward and backward pass on this CPU, with the threads that one of `ranks` ranks has."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads_of_rank(ranks))
    try:
        sample = sample_of(config, num_samples, torch.device("cpu"))
        return measure_layers(layers, sample, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def with_measured_stages(config: PlanConfig, plan: Plan) -> Plan:
    """The plan with the times of its stages as measured here; as it is where its ranks would outnumber the cores.

    Only short steps of schedule=gpipe are measured, with re-materialization for stages that recompute anything and
    without for the others: the plan's schedule, its micro-batches, and which of them are recomputed, are simulated.
    """
    num_ranks = plan.schedule.num_ranks
    if num_ranks > available_cores():
        return plan
    recomputing = {stage for stage, _ in plan.schedule.rematerialized}
    modes = ["full" if number in recomputing else "none" for number in range(len(plan.stages))]
    jobs = [_Job(config, plan.balance, plan.num_samples, remat) for remat in sorted(set(modes))]
    ran = launch(_measure_rank, jobs, cpu_ranks(num_ranks, config.threads or threads_of_rank(num_ranks)))
    counted = [stage.cost for stage in plan.stages]
    measured = {
        job.remat: _measured_costs(steps, counted, plan.schedule.stages_of_rank)
        for job, steps in zip(jobs, ran, strict=True)
    }
    timed = [measured[remat][number] for number, remat in enumerate(modes)]
    stages = tuple(replace(stage, cost=cost) for stage, cost in zip(plan.stages, timed, strict=True))
    costs = tuple(
        tuple(_in_proportion(*of_stage) for of_stage in zip(of_all, counted, timed, strict=True))
        for of_all in plan.costs
    )
    simulation = simulate(plan.schedule, costs)
    return replace(plan, stages=stages, costs=costs, simulation=simulation, is_timed=True)


def _in_proportion(cost: StageCost, counted: StageCost, timed: StageCost) -> StageCost:
    """The cost of another micro-batch than the one whose counted cost was timed."""
    if cost == counted:
        return timed
    forward = cost.forward_s / counted.forward_s
    again = None if timed.rematerialize_s is None else timed.rematerialize_s * forward
    return replace(
        cost,
        forward_s=timed.forward_s * forward,
        backward_s=timed.backward_s * cost.backward_s / counted.backward_s,
        rematerialize_s=again,
        update_s=timed.update_s,
    )


def costs_of_events(events: Sequence[Sequence[Event]], costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
    """`costs` with the median times of measured events, a sequence per rank (StepResult.trace.events).

    An operation that did not run keeps its time. The runtime notes an operation's start after its input has arrived, so
    waiting is not part of it; sending is.
    """
    seconds: dict[tuple[int, OperationKind, bool], list[float]] = defaultdict(list)
    for ran in events:
        # Backward passes that leave the gradients of weights to later are shorter than the others.
        deferred = deferred_in(event.operation for event in ran)
        for event in ran:
            op = event.operation
            halved = op.kind is B and (op.stage, op.micro_batch) in deferred
            seconds[op.stage, op.kind, halved].append(event.end_s - event.start_s)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    return tuple(_timed(cost, stage, medians) for stage, cost in enumerate(costs))


def _timed(cost: StageCost, stage: int, medians: Mapping[tuple[int, OperationKind, bool], float]) -> StageCost:
    weights_s = medians.get((stage, W, False), cost.weights_s)
    halves_s = medians.get((stage, B, True), 0.0) + (weights_s or 0.0)
    backward_s = halves_s if (stage, B, True) in medians else cost.backward_s
    return replace(
        cost,
        forward_s=medians.get((stage, F, False), cost.forward_s),
        backward_s=medians.get((stage, B, False), backward_s),
        rematerialize_s=medians.get((stage, R, False), cost.rematerialize_s),
        weights_s=weights_s,
    )


@dataclass(frozen=True)
class _Job:
    config: PlanConfig
    balance: tuple[int, ...]
    num_samples: int
    remat: str


@dataclass(frozen=True)
class _Steps:
    """What a rank did in several steps. `rest_s`: of each, what came before the first and after the last operation."""

    events: list[Event]
    rest_s: list[float]


def _measure_rank(context: RankContext, jobs: Sequence[_Job]) -> list[list[_Steps]]:
    """For each job the steps of every rank."""
    measured = []
    for job in jobs:
        own = _steps(job)
        every: list[_Steps | None] = [own] * context.world_size
        if context.world_size > 1:
            dist.all_gather_object(every, own)
        measured.append([steps for steps in every if steps is not None])
    return measured


def _steps(job: _Job) -> _Steps:
    step = _training(job)
    for _ in range(NUM_WARMUP_STEPS):
        began = time.perf_counter()
        step()
    # Of the last step that warms up, the longest of all ranks: all make the same number of steps.
    step_s = torch.tensor(time.perf_counter() - began)
    if dist.is_initialized():
        dist.all_reduce(step_s, op=dist.ReduceOp.MAX)
    steps = _Steps([], [])
    for _ in range(max(FEWEST_STEPS, round(MEASURED_S / float(step_s)))):
        events, rest_s = step()
        steps.events.extend(events)
        steps.rest_s.append(rest_s)
    return steps


def _training(job: _Job) -> Callable[[], tuple[list[Event], float]]:
    """A function that makes an optimizer step, as `gpipe train` does; returns its events and the rest of its time."""
    keep_freed_memory()
    config = job.config
    pipe = Pipeline(
        layers_of(config),
        len(job.balance),
        NUM_MICRO_BATCHES,
        loss_fn=loss_of(config),
        balance=job.balance,
        remat=job.remat,
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
        ties=tied_parameters(config.model),
    )
    if config.model.seq_len is None:
        pipe.module.to(memory_format=torch.channels_last)
    inputs, targets = mini_batch_of(config, NUM_MICRO_BATCHES * job.num_samples)
    optimizer = build_optimizer(pipe.named_parameters(), config.optimizer)

    def step() -> tuple[list[Event], float]:
        began = time.perf_counter()
        optimizer.zero_grad()
        cleared = time.perf_counter()
        events = pipe.forward_backward(inputs, targets).trace.events
        optimizer.step()
        return events, cleared - began + time.perf_counter() - events[-1].end_s

    return step


def _measured_costs(
    ran: Sequence[_Steps], costs: Sequence[StageCost], stages_of_rank: Sequence[Sequence[int]]
) -> tuple[StageCost, ...]:
    measured = list(costs_of_events([steps.events for steps in ran], costs))
    for steps, stages in zip(ran, stages_of_rank, strict=True):
        for stage in stages:
            measured[stage] = replace(measured[stage], update_s=statistics.median(steps.rest_s) / len(stages))
    return tuple(measured)
