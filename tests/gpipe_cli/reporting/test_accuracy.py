"""results/accuracy: the paper's rows with its numbers, ours beside them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.config import DatasetConfig, LrScheduleConfig, ModelConfig, OptimizerConfig, TrainConfig
from gpipe_cli.reporting.accuracy import TABLE, update_accuracy
from gpipe_cli.reporting.summary import Summary, summary_of
from gpipe_cli.reporting.tables import read


def config(**settings: Any) -> TrainConfig:
    known: dict[str, Any] = {
        "command": "train",
        "model": ModelConfig(name="amoebanet", variant="D", layers=3, filters=16, aux_weight=0.4),
        "dataset": DatasetConfig(
            name="cifar10", path="/data", image_size=32, augment="none", mean=(0.5,) * 3, std=(0.5,) * 3
        ),
        "optimizer": OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.0),
        "lr_schedule": LrScheduleConfig(name="constant", warmup_epochs=0.0),
        "partitions": 2, "replicas": 1, "micro_batches": 4, "batch_size": 64, "eval_batch_size": None, "image_size": 32,
        "epochs": 1, "steps": None, "seed": 0, "device": "cpu", "precision": "fp32", "remat": "full",
        "schedule": "gpipe", "balance": None, "cut": "flops", "ranks": None, "threads": None, "channels_last": True,
        "label_smoothing": 0.1,
        "ema_decay": 0.0, "clip_grad_norm": None, "workers": 0, "eval_every": 1, "checkpoint_every": 1,
        "keep_checkpoints": 2, "results_dir": "results", "run_dir": None, "resume": None, "tensorboard": False,
        "progress": "none", "log_every": 1,
    }  # fmt: skip
    return TrainConfig(**{**known, **settings})


def add(directory: Path, run: TrainConfig, **facts: Any) -> None:
    known: dict[str, Any] = {
        "num_parameters": 1_000_000,
        "device": "cpu",
        "world_size": 2,
        "top1": 0.5,
        "machine": "CPU, 2 cores",
        "date": "2026-01-02",
        "command_line": "gpipe train dataset=cifar10",
    }
    update_accuracy(directory, run, summary_of(run, **{**known, **facts}))


def rows(directory: Path, kind: str) -> list[dict[str, str]]:
    return [row for row in read(directory, TABLE) if row["kind"] == kind]


def test_other_classes_or_samples_of_a_data_set_have_a_row_of_their_own(tmp_path: Path) -> None:
    whole = config()
    for part in ({}, {"classes": ("0", "1")}, {"classes": ("1", "0")}, {"samples_per_class": 10}):
        add(tmp_path, dataclasses.replace(whole, dataset=dataclasses.replace(whole.dataset, **part)))
    assert len(rows(tmp_path, "measured")) == 4


def test_papers_rows_stand_there_with_their_source(tmp_path: Path) -> None:
    add(tmp_path, config())
    reported = rows(tmp_path, "reported")
    top1 = [(row["dataset"], row["top1"], row["top5"]) for row in reported]
    assert top1 == [
        ("imagenet", "0.844", ""),
        ("imagenet", "0.843", "0.97"),
        ("cifar10", "0.99", ""),
        ("cifar100", "0.913", ""),
        ("stanford_cars", "0.946", ""),
        ("oxford_pets", "0.959", ""),
        ("food101", "0.93", ""),
        ("fgvc_aircraft", "0.927", ""),
        ("birdsnap", "0.836", ""),
    ]
    assert reported[2]["previous_best"] == "0.985"
    assert all(row["source"] and row["num_train"] and row["num_eval"] and row["num_classes"] for row in reported)


def test_our_row_stands_below_the_papers_of_the_same_data(tmp_path: Path) -> None:
    add(tmp_path, config(), top1=0.70125)
    lines = (tmp_path / "accuracy.md").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if "cifar10 " in line and "reported" in line)
    assert "99.00" in lines[place]
    assert "70.1" in lines[place + 1]
    for text in ("amoebanet-D", "measured", "CPU, 2 cores", "2026-01-02", "`gpipe train dataset=cifar10`"):
        assert text in lines[place + 1]


@pytest.mark.parametrize("change", [{"partitions": 4}, {"seed": 1}, {"epochs": 2}, {"remat": "none"}, {"taper": True}])
def test_another_configuration_gets_its_own_row(change: dict[str, Any], tmp_path: Path) -> None:
    add(tmp_path, config())
    add(tmp_path, config(**change), top1=0.6)
    assert [row["top1"] for row in rows(tmp_path, "measured")] == ["0.5", "0.6"]


def test_another_setting_of_a_group_gets_its_own_row(tmp_path: Path) -> None:
    add(tmp_path, config())
    add(tmp_path, config(optimizer=dataclasses.replace(config().optimizer, lr=0.2)))
    assert len(rows(tmp_path, "measured")) == 2


def test_the_same_configuration_replaces_its_row_wherever_it_ran(tmp_path: Path) -> None:
    add(tmp_path, config())
    moved = dataclasses.replace(config().dataset, path="/elsewhere")
    add(tmp_path, config(dataset=moved, run_dir="other", progress="bar", threads=2, resume="auto"), top1=0.6)
    assert [row["top1"] for row in rows(tmp_path, "measured")] == ["0.6"]


def test_columns_are_named_as_in_the_summary() -> None:
    own = {"baseline", "previous_best", "kind", "source", "configuration"}
    assert {column.name for column in TABLE.columns} - own <= {field.name for field in dataclasses.fields(Summary)}
