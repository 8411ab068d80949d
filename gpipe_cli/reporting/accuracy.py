"""`results/accuracy.{csv,md}`: our accuracies, a row a configuration, next to the paper's.

A configuration is everything that can change the result: all settings but those of `_WITHOUT_INFLUENCE`. Its digest
is the key, so a run repeated replaces its row and a run with any other setting or seed gets its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.config_transfer import checkpoint_label
from gpipe_cli.reporting.paper import ACCURACY
from gpipe_cli.reporting.summary import Summary
from gpipe_cli.reporting.tables import (
    KIND,
    MEASURED,
    REPORTED,
    Column,
    Row,
    Table,
    code,
    grouped,
    percent,
    rounded,
    update,
)

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig

# Where a run reads and writes, how much it says, and how its processes and cores are arranged: another row would
# say nothing new.
_WITHOUT_INFLUENCE = (
    "results_dir", "run_dir", "resume", "tensorboard", "progress", "log_every", "checkpoint_every", "keep_checkpoints",
    "workers", "threads", "ranks", "cut", "eval_every",
)  # fmt: skip
_DATASET_WITHOUT_INFLUENCE = ("path", "download", "cache")

_COLUMNS = (
    Column("dataset", "data set"),
    Column("command"),
    Column("model", "model"),
    Column("variant"),
    Column("layers", "L"),
    Column("filters", "D"),
    Column("num_parameters", "parameters", grouped),
    Column("width", "width"),
    Column("image_size", "input"),
    Column("init", "begun with"),
    Column("seq_len", "tokens"),
    Column("top1", "top-1 %", percent),
    Column("top1_std", "± %", percent),
    Column("num_seeds", "seeds"),
    Column("top5", "top-5 %", percent),
    Column("loss", "loss", rounded),
    Column("perplexity", "perplexity", rounded),
    Column("bits_per_byte", "bits/byte", rounded),
    Column("trigram_bits_per_byte", "trigram model", rounded),
    Column("text_digest"),
    Column("num_train", "train", grouped),
    Column("num_eval", "held out", grouped),
    Column("num_classes", "classes", grouped),
    Column("epochs", "epochs"),
    Column("steps"),
    Column("partitions", "partitions"),
    Column("replicas"),
    Column("micro_batches", "micro-batches"),
    Column("batch_size", "batch"),
    Column("precision"),
    Column("remat"),
    Column("schedule"),
    Column("taper"),
    Column("device"),
    Column("world_size"),
    Column("samples_per_s", "images/s", rounded),
    Column("tokens_per_s", "tokens/s", rounded),
    Column("duration_s"),
    Column("seed", "seed"),
    Column("previous_best"),
    Column("baseline"),
    Column(KIND, "kind"),
    Column("machine", "machine"),
    Column("date", "date"),
    Column("command_line", "command", code),
    Column("source", "source"),
    Column("configuration"),
)


def update_accuracy(results_dir: Path, config: TrainConfig, summary: Summary) -> None:
    """Put the run's measured accuracy into the table. Raises OSError; the table is then as before."""
    names = {column.name for column in _COLUMNS}
    values = {name: value for name, value in dataclasses.asdict(summary).items() if name in names}
    if summary.variant is not None:
        values["model"] = f"{summary.model}-{summary.variant}"
    if summary.tokens_per_s is not None:
        values["samples_per_s"] = None  # its column says images
    row = {**values, "baseline": None, KIND: MEASURED, "configuration": configuration_digest(config, summary.dataset)}
    update(results_dir, TABLE, row)


def configuration_digest(config: TrainConfig, dataset: str) -> str:
    """Ten hexadecimal digits, the same for runs whose results ought to be. `dataset`: the label of the data."""
    settings: dict[str, Any] = {k: v for k, v in dataclasses.asdict(config).items() if k not in _WITHOUT_INFLUENCE}
    if not settings["taper"]:
        del settings["taper"]  # rows from before there was such a setting keep their places
    settings["dataset"] = {k: v for k, v in settings["dataset"].items() if k not in _DATASET_WITHOUT_INFLUENCE}
    settings["dataset"]["label"] = dataset
    if settings.get("checkpoint") is not None:
        settings["checkpoint"] = checkpoint_label(settings["checkpoint"])
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _paper_rows() -> tuple[Row, ...]:
    return tuple(
        {
            "dataset": paper.dataset,
            "model": "amoebanet-B",
            "variant": "B",
            "layers": 18,
            "filters": 512,
            "num_parameters": 557_000_000,
            "image_size": paper.image_size,
            "init": "imagenet" if paper.dataset != "imagenet" else None,
            "num_seeds": 5 if paper.dataset != "imagenet" else None,
            "top1": paper.top1,
            "top5": paper.top5,
            "previous_best": paper.previous_best,
            "num_train": paper.num_train,
            "num_eval": paper.num_eval,
            "num_classes": paper.num_classes,
            "partitions": 4 if paper.dataset == "imagenet" else None,
            KIND: REPORTED,
            "source": paper.source,
        }
        for paper in ACCURACY
    )


_DATASET_ORDER = list(dict.fromkeys(paper.dataset for paper in ACCURACY))


def _order(row: Mapping[str, str]) -> tuple[str | int, ...]:
    """The paper's data sets in its order, each with the paper's rows before ours; then the others by name."""
    dataset = row.get("dataset", "")
    place = _DATASET_ORDER.index(dataset) if dataset in _DATASET_ORDER else len(_DATASET_ORDER)
    return (place, dataset, 0 if row.get(KIND) == REPORTED else 1)


TABLE = Table(
    name="accuracy",
    title="Accuracy",
    introduction=(
        "Rows of kind `measured` come from runs of gpipe, each with its machine and command; rows of kind "
        "`reported` are the paper's own figures, with their source (parameters rounded as there). L: normal cells, "
        "D: filters. `Begun with` is the checkpoint that a network was fine-tuned from; of several seeds top-1 is the "
        "mean and ± the sample standard deviation (the paper gives none). Of a language model, tokens is the length of "
        "a sequence, bits/byte is of the held-out text, and trigram model is what a byte-trigram model of the same "
        "split has. Accuracies are on held-out data, in percent here and as fractions in accuracy.csv, which has all "
        "columns."
    ),
    columns=_COLUMNS,
    key=("configuration",),
    reported=_paper_rows(),
    order=_order,
)
