"""Part 1: the engine on the device, several stages in this process, against plain PyTorch on the same device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe_cli.benchmark.subjects import CHANNELS_LAST, CONTIGUOUS, in_layout, memory_format
from gpipe_cli.gpu_check.place import Place, ingredients, strict_numerics
from gpipe_cli.gpu_check.record import PASSED, Cells, Check, CheckFailed, Part
from gpipe_cli.gpu_check.reference import Task, Trained, distance, train_pipeline, train_plain
from gpipe_cli.pipeline import OperationKind, Pipeline, Schedule, make_schedule
from gpipe_cli.pipeline.layers import LayerFactory, named_layers

NUM_MICRO_BATCHES = 4  # of unequal size: the batch is no multiple
WEIGHTS_LAST = "1f1b with the gradients of weights last"  # in one process no schedule of ours would have any so
SEED = 7
MAX_NORM = 0.05  # below the norm of these gradients, so that clipping acts
# Sums in another order, as atomic additions on a GPU are, differ in the last digits, and where a ReLU tips over, by
# more: merely changing the memory format moves the gradients in float32 by 5e-3. What is wrong differs by far more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-2}
# A second step starts from what the first has left: weights, statistics, counters. In float32 it would blow up the
# rounding of the first: batch norms of a few values are that sensitive.
NUM_STEPS = {torch.float64: 2, torch.float32: 1}


@dataclass(frozen=True)
class Case:
    """One way to train the network."""

    schedule: str
    partitions: int
    remat: str
    dtype: torch.dtype = torch.float64
    layout: str = CONTIGUOUS

    def __str__(self) -> str:
        kind = "float64" if self.dtype == torch.float64 else f"float32, {self.layout}"
        return f"{kind}, {self.schedule}, K={self.partitions}, remat={self.remat}"


def part() -> Part:
    """The part as `make gpu-check` runs it."""
    cases = [Case(*combination) for combination in itertools.product(("gpipe", "1f1b"), (1, 2, 4), ("full", "none"))]
    # cuDNN, and torch's own kernels for channels-last, come into play in float32 only.
    cases += [Case("gpipe", 4, "full", torch.float32, layout) for layout in (CONTIGUOUS, CHANNELS_LAST)]
    cases += [Case(WEIGHTS_LAST, 4, "none"), Case(WEIGHTS_LAST, 4, "none", torch.float32, CHANNELS_LAST)]
    checks = [Check(str(case), partial(_equals, case=case)) for case in cases]
    checks.append(Check("float64, clipped by the norm of all gradients, K=4, remat=full", _clips))
    return Part(
        name="engine",
        title="The engine on a GPU",
        introduction=(
            f"Small AmoebaNet-D with dropout and drop path, M = {NUM_MICRO_BATCHES} unequal micro-batches, all stages "
            f"in one process, SGD ({NUM_STEPS[torch.float64]} steps in float64, one in float32), against plain PyTorch "
            "on the same GPU that runs micro-batch by micro-batch with the same seeds. Figures: the norm of the "
            "difference, relative to the norm of what plain PyTorch gives; a row passes with at most "
            f"{TOLERANCE[torch.float64]:g} in float64, {TOLERANCE[torch.float32]:g} in float32. TF32 off, cuDNN "
            "deterministic. Other draws in dropout, for another K or in a recomputation, would show as large "
            "differences. Random state: torch's generators of the CPU and the GPU are as they were."
        ),
        columns=(
            "losses", "gradients", "weights", "running statistics", "evaluation", "recomputations a step",
            "random state",
        ),
        good=PASSED,
        limit_s=80.0,
        checks=tuple(checks),
    )  # fmt: skip


def make_task(
    place: Place, words: Sequence[str], dtype: torch.dtype, layout: str = CONTIGUOUS, samples: int | None = None
) -> Task:
    """The network and a mini-batch of the equality checks, in a dtype and a memory format."""
    samples = samples or place.sizes.equality_batch_size
    settings = (*words, "partitions=1", f"micro_batches={NUM_MICRO_BATCHES}", "remat=none", f"batch_size={samples}")
    parts = ingredients(place, settings)
    layers = [(layer.name, partial(_cast, layer.source, dtype, layout)) for layer in named_layers(parts.layers)]
    return Task(
        layers=layers,
        inputs=in_layout(parts.inputs.to(dtype), layout),
        targets=parts.targets,
        loss_fn=parts.loss_fn,
        num_micro_batches=NUM_MICRO_BATCHES,
        seed=SEED,
        num_steps=NUM_STEPS[dtype],
    )


def make_pipeline(
    task: Task, partitions: int, remat: str, schedule: str | Schedule = "gpipe", **options: Any
) -> Pipeline:
    """The pipeline that trains a task."""
    return Pipeline(
        task.layers,
        partitions,
        task.num_micro_batches,
        loss_fn=task.loss_fn,
        schedule=schedule,
        remat=remat,
        seed=task.seed,
        device=task.device,
        **options,
    )


def _cast(factory: LayerFactory, dtype: torch.dtype, layout: str) -> nn.Module:
    module: nn.Module = factory().to(dtype=dtype, memory_format=memory_format(layout))  # type: ignore[call-overload]
    return module


def _equals(place: Place, case: Case) -> Cells:
    task = make_task(place, place.sizes.equality, case.dtype, case.layout)
    with strict_numerics():
        key = (case.dtype, case.layout)
        if key not in place.kept:  # one reference for all cuts
            place.kept[key] = train_plain(task)
        schedule = _weights_last(case.partitions) if case.schedule == WEIGHTS_LAST else case.schedule
        pipe = make_pipeline(task, case.partitions, case.remat, schedule)
        for device in ("cpu", task.device):
            torch.rand(3, device=device)  # states that are not those of a fresh seed
        before = _random_states(task.device)
        trained = train_pipeline(task, pipe)
        after = _random_states(task.device)
    expected = len(pipe.schedule.rematerialized)
    if case.partitions > 1 and case.remat == "full" and not expected:
        raise CheckFailed("remat=full recomputes nothing")
    done = pipe.forward_backward(task.inputs, task.targets).num_rematerializations
    if done != expected:
        raise CheckFailed(f"{done} recomputations in a step, expected {expected}")
    if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        raise CheckFailed("a random generator was left in another state")
    cells = _compare(trained, place.kept[key], TOLERANCE[case.dtype])
    return {**cells, "recomputations a step": str(done), "random state": "restored"}


def _weights_last(partitions: int) -> Schedule:
    plain = make_schedule(partitions, NUM_MICRO_BATCHES, "1f1b", "none", num_ranks=1)
    last = (replace(op, kind=OperationKind.WEIGHTS) for op in plain.operations[0] if op.kind is OperationKind.BACKWARD)
    return replace(plain, operations=((*plain.operations[0], *last),))


def _clips(place: Place) -> Cells:
    task = replace(make_task(place, place.sizes.equality, torch.float64), max_norm=MAX_NORM)
    with strict_numerics():
        theirs = train_plain(task)
        ours = train_pipeline(task, make_pipeline(task, 4, "full"))
    if float(theirs.norms.min()) <= MAX_NORM:
        raise CheckFailed(f"the gradients' norm is {float(theirs.norms.min()):.3g}: nothing was clipped")
    apart = distance(ours.norms, theirs.norms)
    if apart > TOLERANCE[torch.float64]:
        raise CheckFailed(f"the norms of the gradients differ by {apart:.1e}")
    return _compare(ours, theirs, TOLERANCE[torch.float64])


def _compare(ours: Trained, theirs: Trained, tolerance: float) -> dict[str, str]:
    apart = {
        "losses": distance(ours.losses, theirs.losses),
        "gradients": distance(ours.gradients, theirs.gradients),
        "weights": distance(ours.weights, theirs.weights),
        "running statistics": distance(ours.statistics, theirs.statistics),
        "evaluation": distance(ours.outputs, theirs.outputs),
    }
    wrong = [f"{name} by {value:.1e}" for name, value in apart.items() if not value <= tolerance]
    if wrong:
        raise CheckFailed(f"differ from plain PyTorch (allowed: {tolerance:g}): {', '.join(wrong)}")
    return {name: f"{value:.1e}" if value else "0" for name, value in apart.items()}


def _random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
