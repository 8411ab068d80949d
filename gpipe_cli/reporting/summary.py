"""`summary.json`: what a run was and what came of it, and the same as a few lines for the screen."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.atomic import replace_text
from gpipe_cli.reporting.progress import duration

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's result; None where a field does not apply. Accuracies are fractions in [0, 1].

    `dataset` is the data set's name, and for `folder` "folder:<last part of the path>". `epochs` and `steps` are
    what was done, not what was asked. `loss` is the mean cross-entropy of the evaluation, without smoothing;
    `samples_per_s` and `step_time_s` are training's, start-up excluded. `machine` and `command_line` say where and
    how, `date` when (ISO 8601).
    """

    command: str
    model: str
    dataset: str
    num_parameters: int | None
    partitions: int
    replicas: int
    micro_batches: int
    batch_size: int
    remat: str
    schedule: str
    device: str
    world_size: int
    samples_per_s: float | None = None
    step_time_s: float | None = None
    peak_memory_bytes_per_rank: list[int] | None = None
    bubble_fraction: float | None = None
    top1: float | None = None
    top5: float | None = None
    loss: float | None = None
    seed: int
    versions: dict[str, str] = field(default_factory=dict)
    variant: str | None = None
    layers: int | None = None
    filters: int | None = None
    image_size: int | None = None
    num_classes: int | None = None
    num_train: int | None = None
    num_eval: int | None = None
    epochs: int | None = None
    steps: int | None = None
    train_loss: float | None = None
    precision: str | None = None
    duration_s: float | None = None
    machine: str | None = None
    date: str | None = None
    command_line: str | None = None


def summary_of(config: TrainConfig, **facts: Any) -> Summary:
    """A summary with the fields that the configuration decides; `facts` are the others, by field name."""
    built_in = config.model.name == "amoebanet"
    return Summary(
        command=config.command,
        model=config.model.name if built_in else str(config.model.factory),
        variant=config.model.variant if built_in else None,
        layers=config.model.layers if built_in else None,
        filters=config.model.filters if built_in else None,
        dataset=dataset_label(config.dataset.name, config.dataset.path),
        image_size=config.image_size,
        partitions=config.partitions,
        replicas=config.replicas,
        micro_batches=config.micro_batches,
        batch_size=config.batch_size,
        remat=config.remat,
        schedule=config.schedule,
        precision=config.precision,
        seed=config.seed,
        **facts,
    )


def dataset_label(name: str, path: str | None) -> str:
    """The data set's name, with the folder's own name where that is what tells one from another."""
    return f"folder:{Path(path).name}" if name == "folder" and path else name


def write_summary(run_dir: Path, summary: Summary) -> Path:
    """Write `run_dir/summary.json`, whole or not at all. Numbers that JSON lacks (NaN) become null. Raises OSError."""
    path = run_dir / "summary.json"
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(summary).items()
    }
    replace_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")
    return path


def result_lines(summary: Summary) -> list[str]:
    """The result as a small table for the screen, accuracies in percent; lines without a value are left out."""
    shown = {
        "model": _model(summary),
        "data": _data(summary),
        "pipeline": f"{pipeline_label(summary)}, remat {summary.remat}, "
        f"{counted(summary.world_size, 'rank')} on {summary.device}",
        "top-1": _percent(summary.top1),
        "top-5": _percent(summary.top5),
        "loss": None if summary.loss is None else f"{summary.loss:.4f}",
        "speed": None if summary.samples_per_s is None else f"{summary.samples_per_s:,.4g} images/s",
        "time": None if summary.duration_s is None else f"{_time(summary.duration_s)} for {_steps(summary)}",
    }
    width = max(len(name) for name in shown)
    return [f"{name:<{width}}  {text}" for name, text in shown.items() if text]


def pipeline_label(summary: Summary) -> str:
    """How the model and the mini-batch were cut: "4 partitions, 1 micro-batch"."""
    return f"{counted(summary.partitions, 'partition')}, {counted(summary.micro_batches, 'micro-batch', 'es')}"


def counted(number: int, what: str, plural: str = "s") -> str:
    """A number with its noun: "1 rank", "1,024 ranks"."""
    return f"{number:,} {what}{plural if number != 1 else ''}"


def _steps(summary: Summary) -> str:
    return "evaluation only" if not summary.steps else counted(summary.steps, "step")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _model(summary: Summary) -> str:
    name = summary.model
    if summary.variant is not None:
        name += f"-{summary.variant} ({summary.layers}, {summary.filters})"
    return name if summary.num_parameters is None else f"{name}, {summary.num_parameters:,} parameters"


def _data(summary: Summary) -> str:
    sizes = [
        f"{number:,} {what}"
        for number, what in ((summary.num_train, "train"), (summary.num_eval, "held out"))
        if number
    ]
    return summary.dataset + (f", {', '.join(sizes)}" if sizes else "")


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{100 * fraction:.2f} %"
