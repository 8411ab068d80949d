"""remat=auto: what is kept fits and no more would, it is what the engine then holds, and results stay the same."""

from __future__ import annotations

import dataclasses
import multiprocessing
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_cli.pipeline import Pipeline, make_schedule
from gpipe_cli.pipeline.counting import count_network
from gpipe_cli.pipeline.footprint import Footprint, footprints_by_micro_batch, rank_bytes
from gpipe_cli.pipeline.memory import ActivationMeter
from gpipe_cli.pipeline.policies import keeping_all, rank_operations
from gpipe_cli.pipeline.rematerialization import keep_what_fits, most_kept
from gpipe_cli.pipeline.schedule import Operation, OperationKind, max_held_micro_batches, num_not_recomputed
from gpipe_cli.pipeline.simulate import StageCost, peak_memory
from gpipe_cli.pipeline.sizes import split_sizes

# (policy, stages, micro-batches, ranks)
PLACES = [
    ("gpipe", 1, 4, 1), ("gpipe", 3, 5, 3), ("gpipe", 5, 4, 2), ("1f1b", 4, 8, 4), ("1f1b", 4, 3, 4), ("1f1b", 5, 6, 2),
    ("interleaved", 4, 8, 2), ("interleaved", 6, 4, 2), ("interleaved", 4, 3, 2),
    ("zero_bubble", 2, 8, 2), ("zero_bubble", 4, 8, 4), ("zero_bubble", 5, 6, 2),
]  # fmt: skip


def peak(schedule, rank: int, costs, kept: dict[int, int]) -> int:
    return peak_memory(rank_operations(schedule, rank, kept), costs)[0]


@pytest.mark.parametrize(("policy", "stages", "micro_batches", "ranks"), PLACES)
def test_what_is_kept_fits_and_one_more_would_not(policy, stages, micro_batches, ranks):
    schedule = make_schedule(stages, micro_batches, policy, "full", ranks)
    costs = [StageCost(1, 2, input_bytes=1 + stage, activation_bytes=20 + 7 * stage) for stage in range(stages)]
    for rank, numbers in enumerate(schedule.stages_of_rank):
        least, most = (peak(schedule, rank, costs, dict.fromkeys(numbers, count)) for count in (0, micro_batches))
        for room in range(least, most + 2):
            kept = most_kept(schedule, rank, costs, room)
            assert peak(schedule, rank, costs, kept) <= room
            for stage in numbers:
                if kept[stage] < max_held_micro_batches(keeping_all(schedule.operations[rank]), stage):
                    assert peak(schedule, rank, costs, {**kept, stage: kept[stage] + 1}) > room
        assert peak(schedule, rank, costs, most_kept(schedule, rank, costs, most)) == most
        assert most_kept(schedule, rank, costs, least - 1) == dict.fromkeys(numbers, 0)


@pytest.mark.parametrize(("policy", "stages", "micro_batches", "ranks"), PLACES)
def test_nothing_kept_is_full_and_everything_kept_is_none(policy, stages, micro_batches, ranks):
    full, none = (make_schedule(stages, micro_batches, policy, remat, ranks) for remat in ("full", "none"))
    for kept, other in ((0, full), (micro_batches, none)):
        auto = make_schedule(stages, micro_batches, policy, "auto", ranks, [kept] * stages)
        assert auto.operations == other.operations


def test_memory_is_weights_and_optimizer_inputs_activations_and_room_to_work():
    stage = Footprint(
        layers=range(2), num_parameters=10, num_parameter_tensors=2, resident_bytes=100, working_bytes=50,
        output_bytes=0, input_bytes=0, activation_bytes=1000, saved_bytes=1000, shared_bytes=0, waiting_bytes=0,
    )  # fmt: skip
    schedule = make_schedule(1, 4)
    constant = 10 * 16 + 100 + 50
    assert rank_bytes([stage], 16, 0) == constant
    decision = keep_what_fits([stage], schedule, 16, [constant + 2999])
    assert (decision.kept, decision.rank_bytes, decision.least_bytes) == ((2,), (constant + 2000,), (constant + 1000,))
    assert keep_what_fits([stage], schedule, 16, [constant + 999]).least_bytes == (constant + 1000,)
    assert keep_what_fits([stage], schedule, 12, [constant + 2900]).rank_bytes == (constant - 40 + 2000,)


WIDTH, SAMPLES, MICRO_BATCHES = 32, 32, 8


def network() -> list[tuple[str, Any]]:
    """Each block keeps its output, which the next one's Linear keeps as its input: the same tensor."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    return [*((f"block_{index}", partial(block)) for index in range(8)), ("end", partial(nn.Linear, WIDTH, 2))]


def measure(partitions: int, policy: str, balance: list[int], kept: list[int], taper: bool) -> dict[str, Any]:
    """Runs in every rank: bytes that autograd held, recomputations counted and scheduled."""
    pipe = Pipeline(
        network(), partitions, MICRO_BATCHES, loss_fn=F.cross_entropy, balance=balance, schedule=policy, remat="auto",
        kept=kept, taper=taper,
    )  # fmt: skip
    x, y = torch.randn(SAMPLES, WIDTH), torch.zeros(SAMPLES, dtype=torch.int64)
    pipe.forward_backward(x, y)  # the first pass copies inputs until it knows that no layer overwrites them
    with ActivationMeter(excluded=[*pipe.parameters(), y]) as meter:
        result = pipe.forward_backward(x, y)
    scheduled = sum(op.kind is OperationKind.REMATERIALIZE for op in pipe.schedule.operations[pipe.position])
    return {"peak": meter.peak_bytes, "recomputed": result.num_rematerializations, "scheduled": scheduled}


@pytest.mark.parametrize("taper", [False, True])
@pytest.mark.parametrize(("policy", "ranks", "balance", "share"), [
    ("gpipe", 1, [9], 0.4), ("gpipe", 2, [4, 5], 0.5), ("gpipe", 2, [2, 3, 2, 2], 0.6), ("1f1b", 4, [2, 2, 2, 3], 0.7),
    ("interleaved", 2, [2, 3, 2, 2], 0.6), ("zero_bubble", 2, [4, 5], 0.6), ("zero_bubble", 4, [2, 2, 2, 3], 0.7),
])  # fmt: skip
def test_the_engine_holds_what_was_decided_and_recomputes_the_rest(run_ranks, policy, ranks, balance, share, taper):
    """`share`: how far the budget is from remat=full towards remat=none."""
    partitions = len(balance)
    counted = count_network(network(), torch.empty(1, WIDTH, device="meta"))
    sizes = split_sizes(SAMPLES, MICRO_BATCHES, taper)
    stages = footprints_by_micro_batch(counted, balance, sizes, SAMPLES)
    largest = stages[sizes.index(max(sizes))]
    full, none = (make_schedule(partitions, MICRO_BATCHES, policy, remat, ranks) for remat in ("full", "none"))
    least, most = (
        keep_what_fits(stages, schedule, 16, [bytes_] * ranks) for schedule, bytes_ in [(full, 0), (none, 1e9)]
    )
    memory = [low + share * (high - low) for low, high in zip(least.least_bytes, most.rank_bytes, strict=True)]
    decision = keep_what_fits(stages, full, 16, memory)
    schedule = make_schedule(partitions, MICRO_BATCHES, policy, "auto", ranks, decision.kept, taper)
    assert 0 < len(schedule.rematerialized) < len(full.rematerialized)
    reports = run_ranks(ranks, measure, partitions, policy, balance, list(decision.kept), taper)
    for rank, (report, numbers) in enumerate(zip(reports, schedule.stages_of_rank, strict=True)):
        own = [largest[number] for number in numbers]
        room = memory[rank] - rank_bytes(own, 16, 0)
        resident = sum(stage.resident_bytes for stage in own)
        assert report["peak"] - resident <= room
        assert report["peak"] - resident == pytest.approx(peak_memory(schedule.operations[rank], stages)[1], rel=0.05)
        assert report["recomputed"] == report["scheduled"]
    assert sum(report["recomputed"] for report in reports) == len(schedule.rematerialized)
    # One more micro-batch on the first stage, alone on its rank and without inputs to hold: measured, it is too much.
    more = [decision.kept[0] + 1, *decision.kept[1:]]
    if len(schedule.stages_of_rank[0]) == 1 and more[0] <= max_held_micro_batches(none.operations[0], 0):
        first = run_ranks(ranks, measure, partitions, policy, balance, more, taper)[0]
        constant = rank_bytes([largest[number] for number in schedule.stages_of_rank[0]], 16, 0)
        assert first["peak"] - largest[0].resident_bytes > memory[0] - constant


def with_batchnorm_and_dropout() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(),
        nn.Linear(8, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "ranks"), [("gpipe", 4), ("gpipe", 2), ("1f1b", 4), ("zero_bubble", 4), ("interleaved", 2)]
)
def test_results_are_those_of_full_and_none_to_the_bit(step, assert_same, policy, ranks):
    x = torch.randn(18, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(18) % 3
    full, none, auto = (
        step(
            with_batchnorm_and_dropout, x, y, F.cross_entropy,
            partitions=4, micro_batches=6, ranks=ranks, schedule=policy, remat=remat, kept=kept, steps=2, lr=0.1,
        )
        for remat, kept in [("full", None), ("none", None), ("auto", [3, 2, 1, 0])]
    )  # fmt: skip
    assert_same(auto, full, 0.0)
    assert_same(auto, none, 0.0)
    assert 0 < auto["num_rematerializations"] < full["num_rematerializations"]


class Signals(nn.Module):
    """The first stage: tells of every pass that makes a graph, which a recomputation is."""

    def __init__(self, passes: Any) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(2, 2), passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.passes.release()
        return self.linear(x)


class Waits(torch.autograd.Function):
    """The last stage: its n-th backward pass ends when the first stage has begun its n-th graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passes: Any) -> torch.Tensor:
        ctx.passes = passes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.passes.acquire(timeout=20), "the first stage waits for this gradient before it recomputes"
        return gradient, None


class Last(nn.Module):
    def __init__(self, passes: Any) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(2, 2), passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(Waits.apply(x, self.passes))


def recompute_before_gradients(policy: str, kept: list[int], passes: Any) -> list[str]:
    layers = [("first", partial(Signals, passes)), ("last", partial(Last, passes))]
    pipe = Pipeline(layers, 2, 4, loss_fn=F.cross_entropy, balance=[1, 1], schedule=policy, remat="auto", kept=kept)
    result = pipe.forward_backward(torch.ones(8, 2), torch.zeros(8, dtype=torch.int64))
    return [str(event.operation) for event in result.trace.events]


@pytest.mark.parametrize(("policy", "kept", "order"), [
    ("gpipe", [2, 1], "0F0 0F1 0F2 0F3 0B3 0B2 0R1 0B1 0R0 0B0"),
    ("1f1b", [1, 1], "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0F3 0R2 0B2 0R3 0B3"),
])  # fmt: skip
def test_recomputation_begins_before_the_gradient_arrives(run_ranks, policy, kept, order):
    """The last stage does not let a gradient go before the first one has begun to recompute that micro-batch."""
    passes = multiprocessing.get_context("fork").Semaphore(0)
    first, _ = run_ranks(2, recompute_before_gradients, policy, kept, passes)
    assert " ".join(first) == order


def test_what_is_not_recomputed_is_counted_by_stage():
    schedule = make_schedule(2, 4, "gpipe", "auto", kept=[3, 0])
    assert num_not_recomputed(schedule) == (3, 1)  # the last micro-batch is still fresh
    assert num_not_recomputed(dataclasses.replace(schedule, operations=((), ()))) == (4, 4)
    assert Operation(0, OperationKind.REMATERIALIZE, 0) in schedule.operations[0]
