"""`summary.json`: what a run was and what came of it, and the same as a few lines for the screen."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.atomic import replace_text
from gpipe_cli.reporting.progress import duration

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig

_LONGEST_CLASSES = 30  # characters of a label


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's result; None where a field does not apply. Accuracies are fractions in [0, 1].

    `dataset` is the data set's name, and for `folder` and `text` with its path "folder:<last part of the path>".
    `kept`: with remat=auto, the micro-batches that each stage need not recompute. `epochs` and `steps` are what was
    done, not what was asked. `loss` is the mean cross-entropy of the evaluation, without smoothing; `samples_per_s` and
    `step_time_s` are training's, start-up excluded. `bits_per_byte` is of the held-out text, `trigram_bits_per_byte`
    what a trigram model of the same split has. `init` is what a fine-tuned network began with, a checkpoint or
    "scratch"; of `num_seeds` runs with seeds from `seed` on, accuracies, losses and speeds are means, and `top1_std` is
    the sample standard deviation. `split`, `num_samples` (of text: tokens), `checkpoint` and `weights` ("average" or
    "raw") are of gpipe eval. `machine` and `command_line` say where and how, `date` when (ISO 8601).
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
    kept: list[int] | None = None
    schedule: str
    taper: bool = False
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
    width: int | None = None
    image_size: int | None = None
    seq_len: int | None = None
    num_classes: int | None = None
    num_train: int | None = None
    num_eval: int | None = None
    epochs: int | None = None
    steps: int | None = None
    train_loss: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    trigram_bits_per_byte: float | None = None
    tokens_per_s: float | None = None
    text_digest: str | None = None
    precision: str | None = None
    init: str | None = None
    num_seeds: int | None = None
    top1_std: float | None = None
    split: str | None = None
    num_samples: int | None = None
    checkpoint: str | None = None
    weights: str | None = None
    duration_s: float | None = None
    machine: str | None = None
    date: str | None = None
    command_line: str | None = None


def summary_of(config: TrainConfig, **facts: Any) -> Summary:
    """A summary with the fields that the configuration decides; `facts` are the others, by field name."""
    name = config.model.name
    return Summary(
        command=config.command,
        model=name if name != "module" else str(config.model.factory),
        variant=config.model.variant if name == "amoebanet" else None,
        layers=config.model.layers if name != "module" else None,
        filters=config.model.filters if name == "amoebanet" else None,
        width=config.model.width if name == "transformer" else None,
        dataset=dataset_label(config.dataset.name, config.dataset.path, config.dataset.classes),
        image_size=config.image_size,
        partitions=config.partitions,
        replicas=config.replicas,
        micro_batches=config.micro_batches,
        batch_size=config.batch_size,
        remat=config.remat,
        schedule=config.schedule,
        taper=config.taper,
        precision=config.precision,
        seed=config.seed,
        **facts,
    )


def dataset_label(name: str, path: str | None, classes: Sequence[str] | None = None) -> str:
    """The data set's name, with the folder's own name where that is what tells one from another, and the only classes.

    "digits:5,6,7,8,9"; where the names of the classes are long, how many there are: "cifar100:50 classes".
    """
    label = f"{name}:{Path(path).name}" if name in ("folder", "text") and path else name
    if classes is None:
        return label
    names = ",".join(classes)
    return f"{label}:{names}" if len(names) <= _LONGEST_CLASSES else f"{label}:{len(classes)} classes"


def write_summary(run_dir: Path, summary: Summary) -> Path:
    """Write `run_dir/summary.json`, whole or not at all. Numbers that JSON lacks (NaN) become null. Raises OSError."""
    path = run_dir / "summary.json"
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(summary).items()
    }
    replace_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")
    return path


def result_lines(summary: Summary, **places: str | None) -> list[str]:
    """The result as a small table for the screen, accuracies in percent; lines without a value are left out.

    `places`: where it was written, by name.
    """
    shown = {
        "model": _model(summary),
        "data": _data(summary),
        "pipeline": f"{pipeline_label(summary)}, remat {summary.remat}, "
        f"{counted(summary.world_size, 'rank')} on {summary.device}",
        "begun with": summary.init,
        "weights": _weights(summary),
        "evaluated": _evaluated(summary),
        "top-1": _top1(summary),
        "top-5": _percent(summary.top5),
        "loss": None if summary.loss is None else f"{summary.loss:.4f}",
        "bits/byte": _bits_per_byte(summary),
        "perplexity": None if summary.perplexity is None else f"{summary.perplexity:.4g}",
        "speed": _speed(summary),
        "time": None if summary.duration_s is None else f"{_time(summary.duration_s)} for {_steps(summary)}",
        **places,
    }
    width = max(len(name) for name, text in shown.items() if text)
    return [f"{name:<{width}}  {text}" for name, text in shown.items() if text]


def pipeline_label(summary: Summary) -> str:
    """How the model and the mini-batch were cut: "4 partitions, 1 micro-batch"."""
    tapered = "tapered " if summary.taper else ""
    parts = counted(summary.micro_batches, f"{tapered}micro-batch", "es")
    return f"{counted(summary.partitions, 'partition')}, {parts}"


def counted(number: int, what: str, plural: str = "s") -> str:
    """A number with its noun: "1 rank", "1,024 ranks"."""
    return f"{number:,} {what}{plural if number != 1 else ''}"


def _top1(summary: Summary) -> str | None:
    mean = _percent(summary.top1)
    if mean is None or summary.top1_std is None:
        return mean
    return f"{mean}, mean of {summary.num_seeds} seeds; standard deviation {100 * summary.top1_std:.2f} %"


def _bits_per_byte(summary: Summary) -> str | None:
    if summary.bits_per_byte is None:
        return None
    trigram = summary.trigram_bits_per_byte
    return f"{summary.bits_per_byte:.3f}" + ("" if trigram is None else f" (a byte-trigram model: {trigram:.3f})")


def _speed(summary: Summary) -> str | None:
    if summary.tokens_per_s is not None:
        return f"{summary.tokens_per_s:,.4g} tokens/s"
    return None if summary.samples_per_s is None else f"{summary.samples_per_s:,.4g} images/s"


def _weights(summary: Summary) -> str | None:
    if summary.checkpoint is None:
        return None
    kind = "moving average" if summary.weights == "average" else "not averaged"
    return f"{summary.checkpoint}, {kind}, trained for {counted(summary.steps or 0, 'step')}"


def _evaluated(summary: Summary) -> str | None:
    if summary.split is None or summary.num_samples is None:
        return None
    which = "of the training split, not augmented" if summary.split == "train" else "held out"
    return f"{counted(summary.num_samples, 'token' if summary.seq_len else 'sample')} {which}"


def _steps(summary: Summary) -> str:
    if summary.split is not None:
        return "the evaluation"
    if not summary.steps:
        return "evaluation only"
    return (f"{summary.num_seeds} x " if summary.num_seeds else "") + counted(summary.steps, "step")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _model(summary: Summary) -> str:
    name = summary.model
    if summary.variant is not None:
        name += f"-{summary.variant} ({summary.layers}, {summary.filters})"
    elif summary.width is not None:
        name += f"-{summary.layers} (width {summary.width})"
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
