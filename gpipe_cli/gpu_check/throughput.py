"""Part 5: training throughput by memory format and precision, through the pipeline, and by an ordinary loop with and
without torch.compile.

The pipeline's own layers are not compiled: while it trains, batch norms write each micro-batch's moments into scratch
that changes from pass to pass (pipeline/batchnorm.py), which compiled code does not allow.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from gpipe_cli.benchmark.measure import Stopwatch, spread
from gpipe_cli.benchmark.subjects import CHANNELS_LAST, CONTIGUOUS, Subject
from gpipe_cli.compose import load
from gpipe_cli.gpu_check.place import Place, check_loss, convolution_precision, make, release
from gpipe_cli.gpu_check.record import MEASURED, REPORTED, Cells, Check, Part, Row
from gpipe_cli.gpu_check.sizes import Sizes
from gpipe_cli.planning.network import make_planner
from gpipe_cli.reporting.paper import TORCHGPIPE_SAMPLES_PER_S

MEMORY_SHARE = 0.8  # of the GPU, for what is predicted of the ordinary loop: the rest is workspaces and fragments
MIN_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A row. The pipeline has K = 1 and recomputes; the ordinary loop works on whole mini-batches and keeps all."""

    plain: bool
    layout: str
    precision: str
    compiled: bool = False

    def __str__(self) -> str:
        who = "ordinary loop" if self.plain else "pipeline"
        return f"{who}, {self.layout}, {self.precision}{', compiled' * self.compiled}"


def part(sizes: Sizes) -> Part:
    """The part as `make gpu-check` runs it. Compiling takes longest and comes last, the likely winner first."""
    kinds = ((CHANNELS_LAST, "bf16"), (CHANNELS_LAST, "fp32"), (CONTIGUOUS, "bf16"), (CONTIGUOUS, "fp32"))
    cases = [
        *(Case(True, *kind) for kind in kinds),
        *(Case(False, *kind) for kind in kinds),
        *(Case(True, *kind, compiled=True) for kind in kinds),
    ]
    return Part(
        name="throughput",
        title="Throughput",
        introduction=(
            "AmoebaNet-D (6, 256), 224 x 224, RMSProp; the batch is the largest of "
            f"{', '.join(map(str, sizes.throughput_batches))} for which the ordinary loop should fit. Pipeline: K = 1, "
            f"M = {sizes.throughput_micro_batches}, remat=full. Ordinary loop: the same layers, whole mini-batches, "
            "nothing recomputed. A step is forward, backward and update, to the end of the GPU's work; medians with "
            f"quartiles of up to {sizes.max_steps} steps after {sizes.warmup_steps} that warm up, compilation among "
            "those. fp32: as gpipe train runs, which is with TF32 in convolutions where the GPU has it. "
            "Compiled: each layer by torch.compile. The pipeline's layers are not compiled: compiled code does not "
            "allow what it does to batch norms."
        ),
        columns=(
            "batch", "convolutions", "pictures/s", "x the loop", "step, ms", "from", "to", "steps", "warm-up, s",
            "peak allocated, GB",
        ),
        good=MEASURED,
        limit_s=150.0,
        checks=tuple(Check(str(case), partial(_measure, case=case)) for case in cases),
        reported=(
            Row(
                "torchgpipe, AmoebaNet-D (18, 256), K=2, M=1, two P40",
                REPORTED,
                {"batch": "96", "pictures/s": f"{TORCHGPIPE_SAMPLES_PER_S:g}"},
                "torchgpipe, docs/benchmarks.rst",
            ),
        ),
    )  # fmt: skip


def _measure(place: Place, case: Case) -> Cells:
    sizes = place.sizes
    batch_size = _batch_size(place)
    words = (
        *sizes.throughput, "partitions=1", f"micro_batches={sizes.throughput_micro_batches}", "remat=full",
        f"batch_size={batch_size}", f"precision={case.precision}",
        f"channels_last={str(case.layout == CHANNELS_LAST).lower()}",
    )  # fmt: skip
    release(place.device)
    subject = make(place, words, plain=case.plain, compile_backend=sizes.compile_backend if case.compiled else None)
    try:
        subject.use(case.layout)
        times, warmup_s = _times(place, subject)
        check_loss(subject)
    finally:
        if case.compiled:
            torch.compiler.reset()  # compiled code holds on to the layers
    middle = spread(times)
    place.kept[case] = rate = batch_size / middle.median_s
    loop = place.kept.get(Case(True, case.layout, case.precision))
    convolutions = "bf16" if case.precision == "bf16" else convolution_precision(place.device)
    return {
        "batch": str(batch_size),
        "convolutions": convolutions,
        "pictures/s": f"{rate:.1f}",
        "x the loop": "" if loop is None else f"{rate / loop:.2f}",
        "step, ms": f"{1e3 * middle.median_s:.1f}",
        "from": f"{1e3 * middle.low_s:.1f}",
        "to": f"{1e3 * middle.high_s:.1f}",
        "steps": str(len(times)),
        "warm-up, s": f"{warmup_s:.1f}",
        "peak allocated, GB": f"{torch.cuda.max_memory_allocated(place.device) / 1e9:.2f}" if place.is_gpu else "",
    }


def _times(place: Place, subject: Subject) -> tuple[list[float], float]:
    """Seconds of each measured step, and of all that warmed up together."""
    stopwatch = Stopwatch(subject, None, place.device)
    began = time.monotonic()
    stopwatch.run(place.sizes.warmup_steps)
    warm = time.monotonic()
    times: list[float] = []
    while len(times) < place.sizes.max_steps:
        if len(times) >= MIN_STEPS and time.monotonic() - warm > place.sizes.row_s:
            break
        times += stopwatch.run(1).step_times_s
    return times, warm - began


def _batch_size(place: Place) -> int:
    """The same for all rows: what the one that needs most memory, the ordinary loop in float32, is predicted to fit."""
    if "batch" not in place.kept:
        place.kept["batch"] = place.sizes.throughput_batches[-1]
        if place.is_gpu:
            total = torch.cuda.get_device_properties(place.device).total_memory
            for batch_size in place.sizes.throughput_batches:
                if _predicted_bytes(place, batch_size) <= MEMORY_SHARE * total:
                    place.kept["batch"] = batch_size
                    break
    size: int = place.kept["batch"]
    return size


def _predicted_bytes(place: Place, batch_size: int) -> int:
    words = ("partitions=1", "micro_batches=1", "remat=none", "ranks=1", "hardware=h200", f"batch_size={batch_size}")
    planner = make_planner(load("plan", [*place.sizes.throughput, *words]))
    return planner.evaluate(planner.first_choice()).memory_bytes_per_rank[0]
