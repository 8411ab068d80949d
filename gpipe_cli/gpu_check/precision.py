"""Part 2: automatic mixed precision in bfloat16: which dtypes stand where, and whether the cut changes the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.benchmark.subjects import CHANNELS_LAST
from gpipe_cli.gpu_check.engine import make_pipeline, make_task
from gpipe_cli.gpu_check.place import Place, strict_numerics
from gpipe_cli.gpu_check.record import PASSED, Cells, Check, CheckFailed, Part
from gpipe_cli.gpu_check.reference import Task, distance
from gpipe_cli.pipeline import Pipeline
from gpipe_cli.pipeline.microbatch import flatten
from gpipe_cli.pipeline.partition import layer_ranges

# The same operations in the same precision: only sums in another order, rounded to eight bits, differ.
SAME_LOSS, SAME_GRADIENTS = 5e-3, 1e-1
NEAR_FP32 = 5e-2  # bfloat16 has eight bits: each of some twenty layers in a row may be off by 0.4 %


@dataclass(frozen=True)
class Case:
    """A cut whose training step is compared with that of K = 1 without re-materialization."""

    partitions: int
    remat: str
    schedule: str = "gpipe"

    def __str__(self) -> str:
        return f"bf16, {self.schedule}, K={self.partitions}, remat={self.remat}"


@dataclass(frozen=True, kw_only=True)
class _Step:
    loss: float
    gradients: dict[str, Tensor]


def part() -> Part:
    """The part as `make gpu-check` runs it."""
    cases = (Case(1, "none"), Case(1, "full"), Case(2, "none"), Case(2, "full"), Case(2, "full", "1f1b"))
    return Part(
        name="bf16",
        title="Mixed precision",
        introduction=(
            "One step of the same network, channels-last, under autocast to bfloat16. Weights, gradients, running "
            "statistics and the loss must be float32, activations between stages and the outputs bfloat16. Allowed: a "
            f"loss that differs from K = 1, remat=none by {SAME_LOSS:.1%} and from float32 by {NEAR_FP32:.0%}, "
            f"gradients whose difference from those of K = 1 has {SAME_GRADIENTS:.0%} of their norm."
        ),
        columns=("loss", "off K=1", "off float32", "gradients off K=1", "between stages", "outputs"),
        good=PASSED,
        limit_s=30.0,
        checks=tuple(Check(str(case), partial(_is_mixed, case=case)) for case in cases),
    )


def _is_mixed(place: Place, case: Case) -> Cells:
    task = make_task(place, place.sizes.equality, torch.float32, CHANNELS_LAST)
    with strict_numerics():
        if "bf16" not in place.kept:
            place.kept["fp32"] = _step(make_pipeline(task, 1, "none"), task)
            place.kept["bf16"] = _step(make_pipeline(task, 1, "none", autocast=torch.bfloat16), task)
        pipe = make_pipeline(task, case.partitions, case.remat, case.schedule, autocast=torch.bfloat16)
        boundary: set[torch.dtype] = set()
        _watch_boundaries(pipe, boundary)
        ours, same, full = _step(pipe, task), place.kept["bf16"], place.kept["fp32"]
        outputs = pipe.evaluate(task.inputs)
    assert isinstance(outputs, Tensor)
    _check_dtypes(pipe, boundary, outputs)
    off_same = abs(ours.loss - same.loss) / abs(same.loss)
    off_full = abs(ours.loss - full.loss) / abs(full.loss)
    gradients = distance(ours.gradients, same.gradients)
    for what, value, allowed in (
        ("the loss differs from K=1", off_same, SAME_LOSS),
        ("the loss differs from float32", off_full, NEAR_FP32),
        ("gradients differ from K=1", gradients, SAME_GRADIENTS),
    ):
        if not value <= allowed:
            raise CheckFailed(f"{what} by {value:.1e}, allowed are {allowed:g}")
    return {
        "loss": f"{ours.loss:.6f}",
        "off K=1": f"{off_same:.1e}",
        "off float32": f"{off_full:.1e}",
        "gradients off K=1": f"{gradients:.1e}",
        "between stages": "bfloat16" if boundary else "",
        "outputs": "bfloat16",
    }


def _step(pipe: Pipeline, task: Task) -> _Step:
    result = pipe.forward_backward(task.inputs, task.targets)
    if any(loss.dtype != torch.float32 for loss in result.trace.losses.values()):
        raise CheckFailed("the loss is not float32")
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    return _Step(loss=float(result.loss), gradients=gradients)


def _watch_boundaries(pipe: Pipeline, found: set[torch.dtype]) -> None:
    """Collect the dtypes of what enters every stage but the first."""

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        tensors, _ = flatten(args[0], "the boundary")
        found.update(tensor.dtype for tensor in tensors)

    layers = dict(pipe.module.named_children())
    for stage in layer_ranges(pipe.balance)[1:]:
        layers[pipe.layer_names[stage.start]].register_forward_pre_hook(note)


def _check_dtypes(pipe: Pipeline, boundary: set[torch.dtype], outputs: Tensor) -> None:
    if boundary - {torch.bfloat16} or (not boundary and len(pipe.balance) > 1):
        raise CheckFailed(f"between stages: {sorted(map(str, boundary))}, expected bfloat16")
    if outputs.dtype != torch.bfloat16:
        raise CheckFailed(f"outputs are {outputs.dtype}, expected bfloat16")
    for name, parameter in pipe.named_parameters():
        gradient = parameter.grad
        if parameter.dtype != torch.float32 or gradient is None or gradient.dtype != torch.float32:
            raise CheckFailed(f"{name} or its gradient is not float32")
    for name, buffer in pipe.module.named_buffers():
        if buffer.is_floating_point() and buffer.dtype != torch.float32:
            raise CheckFailed(f"{name} is {buffer.dtype}, expected torch.float32")
