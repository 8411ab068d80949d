"""Part 4: what `gpipe plan` predicts of memory, against what is counted and allocated on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gpipe_cli.compose import load
from gpipe_cli.gpu_check.place import Place, allocated_bytes, check_loss, make, release
from gpipe_cli.gpu_check.record import PASSED, Cells, Check, CheckFailed, Part
from gpipe_cli.pipeline.memory import ActivationMeter
from gpipe_cli.planning.network import make_planner
from gpipe_cli.planning.planner import Plan
from gpipe_cli.training.loop import peak_memory_bytes

ALLOWED = 0.1  # predicted activations must be within 10 % of counted ones, as on a CPU
MB = 1e6


@dataclass(frozen=True)
class Case:
    """A row: K stages in this process, M micro-batches."""

    partitions: int
    micro_batches: int
    remat: str
    schedule: str = "gpipe"

    def __str__(self) -> str:
        return f"{self.schedule}, K={self.partitions}, M={self.micro_batches}, remat={self.remat}"

    @property
    def words(self) -> tuple[str, ...]:
        """The settings, as `gpipe bench` and `gpipe plan` both take them."""
        return (
            f"partitions={self.partitions}", f"micro_batches={self.micro_batches}", f"remat={self.remat}",
            f"schedule={self.schedule}",
        )  # fmt: skip


def part() -> Part:
    """The part as `make gpu-check` runs it."""
    cases = (
        Case(1, 1, "none"), Case(1, 8, "full"), Case(1, 8, "none"), Case(2, 8, "full"), Case(2, 8, "none"),
        Case(2, 8, "full", "1f1b"),
    )  # fmt: skip
    return Part(
        name="prediction",
        title="Predicted and measured memory",
        introduction=(
            "AmoebaNet-D (6, 64), 224 x 224, batch 32, RMSProp, float32, channels-last, all stages in one process; the "
            "cut is the plan's. Activations: what autograd holds for backward passes, the mini-batch among it, "
            f"predicted by gpipe plan against counted in a step on the GPU; a row passes when they are within "
            f"{ALLOWED:.0%}. Memory: the plan's sum of parameters, activations and the largest operation's tensors, "
            "against the peak of what PyTorch had allocated; libraries' workspaces are in the second only. MB is 10^6 "
            "bytes."
        ),
        columns=(
            "activations predicted, MB", "counted, MB", "predicted / counted", "memory predicted, MB",
            "allocated, MB", "predicted / allocated",
        ),
        good=PASSED,
        limit_s=40.0,
        checks=tuple(Check(str(case), partial(_compare, case=case)) for case in cases),
    )  # fmt: skip


def _compare(place: Place, case: Case) -> Cells:
    settings = (*place.sizes.prediction, f"batch_size={place.sizes.prediction_batch_size}", *case.words)
    plan = _plan(settings)
    release(place.device)
    before = allocated_bytes(place.device)
    subject = make(place, settings, balance=plan.balance)
    for _ in range(2):  # the optimizer's values appear with the first step
        subject.step()
    if place.is_gpu:
        release(place.device)
    subject.step()
    check_loss(subject)
    allocated = peak_memory_bytes(place.device) - before
    with ActivationMeter(subject.tensors()) as meter:
        subject.step()
    # The first layer keeps views of the mini-batch, which hold all of it.
    activations = sum(plan.simulation.peak_saved_bytes) + sum(stage.footprint.resident_bytes for stage in plan.stages)
    ratio = activations / meter.peak_bytes
    if abs(ratio - 1) > ALLOWED:
        raise CheckFailed(
            f"{activations / MB:.1f} MB of activations predicted, {meter.peak_bytes / MB:.1f} MB counted: "
            f"{ratio:.3f}, allowed is 1 within {ALLOWED:g}"
        )
    memory = sum(plan.memory_bytes_per_rank)
    return {
        "activations predicted, MB": f"{activations / MB:.1f}",
        "counted, MB": f"{meter.peak_bytes / MB:.1f}",
        "predicted / counted": f"{ratio:.3f}",
        "memory predicted, MB": f"{memory / MB:.1f}",
        "allocated, MB": f"{allocated / MB:.1f}",
        "predicted / allocated": f"{memory / allocated:.3f}",
    }


def _plan(settings: tuple[str, ...]) -> Plan:
    """The plan of one process that hosts all stages. Its memory does not depend on the hardware."""
    planner = make_planner(load("plan", [*settings, "ranks=1", "hardware=h200"]))
    return planner.evaluate(planner.first_choice())
