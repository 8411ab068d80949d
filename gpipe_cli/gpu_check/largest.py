"""Part 3: the first two columns of the paper's Table 1, the largest AmoebaNet-D that trains in 8 GB of one accelerator.

Naive-1 keeps all activations of the whole mini-batch; Pipeline-1 cuts it into micro-batches and recomputes. A size
trains when two optimizer steps run under the cap: what the optimizer keeps is there from the second on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gpipe_cli.benchmark.subjects import Subject
from gpipe_cli.gpu_check.place import Place, allocated_bytes, check_loss, is_out_of_memory, make, release
from gpipe_cli.gpu_check.record import MEASURED, REPORTED, Cells, Check, CheckFailed, NotMeasured, Part, Row, first_line
from gpipe_cli.gpu_check.search import largest_that_fits
from gpipe_cli.gpu_check.sizes import GB, Sizes
from gpipe_cli.pipeline.memory import ActivationMeter
from gpipe_cli.reporting.paper import TABLE1, TABLE1_SOURCE, PaperSize
from gpipe_cli.training.loop import peak_memory_bytes

NUM_STEPS = 2
BYTES_PER_PARAMETER = 16  # weight, gradient, and RMSProp's mean square and momentum, in float32
# cuBLAS keeps workspaces, 32 MB and more for each thread, in torch's memory.
LEFTOVER_BYTES = 256 * 2**20
Size = tuple[int, int]  # the paper's (L, D): normal cells, filters


@dataclass(frozen=True)
class Column:
    """A column of Table 1 as settings; `name` is the paper's."""

    name: str
    micro_batches: int
    remat: str
    precision: str = "fp32"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of training a size; `problem` says what did not fit, None if it trains."""

    num_parameters: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    step_time_s: float = 0.0
    problem: str | None = None


def part(sizes: Sizes) -> Part:
    """The part as `make gpu-check` runs it."""
    many = sizes.table1_micro_batches
    papers = ((Column("Naive-1", 1, "none"), sizes.naive), (Column("Pipeline-1", many, "full"), sizes.pipeline))
    halves = tuple((Column(column.name, column.micro_batches, column.remat, "bf16"), size) for column, size in papers)
    checks = [
        Check(f"{column.name}, the paper's size", partial(_try_papers_size, column=column, size=size))
        for column, size in papers
    ]
    for column, (layers, filters) in (*papers, *halves):
        checks.append(
            Check(
                f"{column.name}, largest D for L={layers}, {column.precision}",
                partial(
                    _search, column=column, candidates=[(layers, d) for d in sizes.filters], start=(layers, filters)
                ),
            )
        )
    for column, (layers, filters) in papers:
        checks.append(
            Check(
                f"{column.name}, largest L for D={filters}, {column.precision}",
                partial(
                    _search, column=column, candidates=[(n, filters) for n in sizes.layers], start=(layers, filters)
                ),
            )
        )
    return Part(
        name="table1",
        title="Table 1: the largest AmoebaNet-D in 8 GB",
        introduction=(
            f"Mini-batches of {sizes.table1_batch_size} pictures of 224 x 224, RMSProp, channels-last, all of torch's "
            f"memory capped at {sizes.limit_bytes / GB:g} GB (GB is 10^9 bytes; the CUDA context is outside). Naive-1: "
            f"one micro-batch, nothing recomputed. Pipeline-1: {many} micro-batches (the paper does not state how "
            f"many), remat=full. A size trains when {NUM_STEPS} steps run. Parameter memory: {BYTES_PER_PARAMETER} "
            "bytes a parameter here, with the gradient; 12 in the paper. All else: what was allocated at the peak "
            "besides. D is a multiple of 16, L of 3. By gpipe plan, PyTorch needs 31 GB for Naive-1's size in "
            "float32: that column cannot come out as on a TPU. torchgpipe found so too, on a P40 of 24 GB."
        ),
        columns=(
            "(L, D)", "trains", "parameters", "parameter memory, GB", "all else, GB", "peak allocated, GB",
            "reserved, GB", "step, s", "does not train", "trials",
        ),
        good=MEASURED,
        limit_s=140.0,
        checks=tuple(checks),
        reported=tuple(row for size in TABLE1[:2] for row in _reported(size)),
    )  # fmt: skip


def _reported(size: PaperSize) -> list[Row]:
    common = {"(L, D)": f"({size.layers}, {size.filters})", "parameters": f"{size.num_parameters / 1e6:.0f}M"}
    paper = {
        **common,
        "trains": "yes",
        "parameter memory, GB": f"{size.parameter_bytes / GB:.2f}",
        "all else, GB": f"{size.activation_bytes / GB:.2f}",
    }
    other = {**common, "trains": "no", "parameter memory, GB": f"{(size.torchgpipe_parameter_bytes or 0) / GB:.2f}"}
    if size.torchgpipe_activation_bytes is not None:
        other |= {"trains": "yes", "all else, GB": f"{size.torchgpipe_activation_bytes / GB:.2f}"}
    return [
        Row(f"{size.name}, TPUv2 of 8 GB", REPORTED, paper, TABLE1_SOURCE),
        Row(f"{size.name}, P40 of 24 GB", REPORTED, other, "torchgpipe, docs/benchmarks.rst"),
    ]


def _try_papers_size(place: Place, column: Column, size: Size) -> Cells:
    trial = _try(place, column, size)
    if trial.problem is not None:
        return {"(L, D)": str(size), "trains": "no: out of memory", "trials": "1"}
    return {**_cells(size, trial), "trials": "1"}


def _search(place: Place, column: Column, candidates: Sequence[Size], start: Size) -> Cells:
    began, longest = time.monotonic(), 0.0
    trials: dict[Size, Trial] = {}

    def fits(size: Size) -> bool | None:
        nonlocal longest
        before = time.monotonic()
        spent = before - began
        if spent + longest > place.sizes.search_s or place.left_s < 1.5 * longest:
            return None
        trials[size] = _try(place, column, size)
        longest = max(longest, time.monotonic() - before)
        return trials[size].problem is None

    found = largest_that_fits(candidates, candidates.index(start), fits)
    if not trials:
        raise NotMeasured("no time was left for the first trial")
    too_large = str(candidates[found.too_large]) if found.too_large < len(candidates) else "none was found"
    if not found.is_complete:
        too_large += "; not all between were tried, for lack of time"
    counts = {"does not train": too_large, "trials": str(len(trials))}
    if found.fits < 0:
        return {**counts, "(L, D)": f"below {candidates[found.too_large]}", "trains": "no: out of memory"}
    return {**_cells(candidates[found.fits], trials[candidates[found.fits]]), **counts}


def _cells(size: Size, trial: Trial) -> dict[str, str]:
    parameter_bytes = BYTES_PER_PARAMETER * trial.num_parameters
    return {
        "(L, D)": str(size),
        "trains": "yes",
        "parameters": f"{trial.num_parameters:,}",
        "parameter memory, GB": f"{parameter_bytes / GB:.2f}",
        "all else, GB": f"{(trial.peak_bytes - parameter_bytes) / GB:.2f}",
        "peak allocated, GB": f"{trial.peak_bytes / GB:.2f}",
        "reserved, GB": f"{trial.reserved_bytes / GB:.2f}",
        "step, s": f"{trial.step_time_s:.2f}",
    }


def _try(place: Place, column: Column, size: Size) -> Trial:
    """Train a size under the cap; what was tried before in this process is not tried again."""
    key = (column, size)
    if key not in place.kept:
        _cap(place)
        release(place.device)
        left_over = allocated_bytes(place.device)
        if left_over > LEFTOVER_BYTES:
            raise CheckFailed(f"{left_over / 1e6:.0f} MB are still allocated from the size before")
        place.kept[key] = _train_or_not(place, column, size)
    trial: Trial = place.kept[key]
    return trial


def _train_or_not(place: Place, column: Column, size: Size) -> Trial:
    try:
        return _train(place, column, size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Trial(problem=first_line(error))
    # The exception ends here, and with it the frames that hold the tensors: the next trial can free them.


def _train(place: Place, column: Column, size: Size) -> Trial:
    layers, filters = size
    sizes = place.sizes
    words = (
        *sizes.table1, f"model.layers={layers}", f"model.filters={filters}", f"batch_size={sizes.table1_batch_size}",
        "partitions=1", f"micro_batches={column.micro_batches}", f"remat={column.remat}",
        f"precision={column.precision}",
    )  # fmt: skip
    subject = make(place, words)
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        subject.step()
        check_loss(subject)  # waits for the GPU
        step_time_s = time.perf_counter() - began
    if not place.is_gpu:
        _pretend_cap(subject, sizes.limit_bytes)
    return Trial(
        num_parameters=subject.num_parameters,
        peak_bytes=peak_memory_bytes(place.device),
        reserved_bytes=torch.cuda.max_memory_reserved(place.device) if place.is_gpu else 0,
        step_time_s=step_time_s,
    )


def _cap(place: Place) -> None:
    if place.is_gpu:
        total = torch.cuda.get_device_properties(place.device).total_memory
        if total < place.sizes.limit_bytes:
            raise NotMeasured(
                f"the GPU has {total / GB:.1f} GB, less than the cap of {place.sizes.limit_bytes / GB:g} GB"
            )
        torch.cuda.set_per_process_memory_fraction(place.sizes.limit_bytes / total, place.device)


def _pretend_cap(subject: Subject, limit_bytes: int) -> None:
    """A dry run on a CPU, where nothing can be capped: what was counted stands for what would be allocated."""
    with ActivationMeter(subject.tensors()) as meter:
        subject.step()
    needed = BYTES_PER_PARAMETER * subject.num_parameters + meter.peak_bytes
    if needed > limit_bytes:
        raise torch.OutOfMemoryError(f"counted {needed} bytes, the dry run's cap is {limit_bytes}")
