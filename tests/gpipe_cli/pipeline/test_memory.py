"""Activation memory: re-materialization saves what counting predicts, and recomputes what the schedule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline import Pipeline
from gpipe_cli.pipeline.memory import ActivationMeter

LAYERS, WIDTH, SAMPLES = 8, 16, 32


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    del targets
    return outputs.mean()


def measure(partitions: int, micro_batches: int, remat: str, schedule: str) -> dict[str, Any]:
    # Each Tanh saves its output, each Linear its input: the output of the Tanh before it.
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    pipe = Pipeline(
        nn.Sequential(*layers), partitions, micro_batches, loss_fn=mean, remat=remat, schedule=schedule,
        balance=[2 * LAYERS // partitions] * partitions,
    )  # fmt: skip
    x = torch.randn(SAMPLES, WIDTH)
    pipe.forward_backward(x, x)  # the first pass copies inputs until it knows that no layer overwrites them
    with ActivationMeter(excluded=pipe.parameters()) as meter:
        result = pipe.forward_backward(x, x)
    return {"peak": meter.peak_bytes, "live": meter.live_bytes, "recomputed": result.num_rematerializations}


@pytest.mark.parametrize(("partitions", "micro_batches"), [(1, 4), (2, 4), (2, 8), (4, 8)])
def test_peak_activation_memory_falls_by_the_factor_that_counting_predicts(run_ranks, partitions, micro_batches):
    kept = run_ranks(partitions, measure, partitions, micro_batches, "none", "gpipe")
    dropped = run_ranks(partitions, measure, partitions, micro_batches, "full", "gpipe")
    value_bytes = SAMPLES // micro_batches * WIDTH * 4
    layers_per_stage = LAYERS // partitions
    for rank, (none, full) in enumerate(zip(kept, dropped, strict=True)):
        # Per micro-batch: the stage's input (a view of the mini-batch on the first rank) and one output per Tanh.
        per_micro_batch = value_bytes * (layers_per_stage + (rank > 0))
        whole_batch = value_bytes * micro_batches if rank == 0 else 0
        assert none["peak"] == per_micro_batch * micro_batches + whole_batch
        assert full["peak"] == per_micro_batch + whole_batch
        assert none["live"] == full["live"] == 0


@pytest.mark.parametrize(
    ("schedule", "remat", "recomputed"),
    [("gpipe", "full", [3, 3]), ("gpipe", "none", [0, 0]), ("1f1b", "full", [4, 0]), ("1f1b", "except_last", [3, 0])],
)
def test_recomputations_are_those_of_the_schedule(run_ranks, schedule, remat, recomputed):
    assert [r["recomputed"] for r in run_ranks(2, measure, 2, 4, remat, schedule)] == recomputed


def test_recomputation_really_runs_the_layers_again():
    calls = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, args, output: calls.append(torch.is_grad_enabled()))
    x = torch.ones(4, 2)
    for remat, expected in (("full", [False, False, False, True, True, True, True]), ("none", [True] * 4)):
        calls.clear()
        Pipeline(nn.Sequential(layer), 1, 4, loss_fn=mean, remat=remat).forward_backward(x, x)
        assert calls == expected
