"""summary.json and the result on the screen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.reporting.summary import Summary, dataset_label, result_lines, write_summary

FIELDS = (
    "command", "model", "dataset", "num_parameters", "partitions", "replicas", "micro_batches", "batch_size",
    "remat", "schedule", "device", "world_size", "samples_per_s", "step_time_s", "peak_memory_bytes_per_rank",
    "bubble_fraction", "top1", "top5", "loss", "seed", "versions",
)  # fmt: skip


def summary(**facts: Any) -> Summary:
    known: dict[str, Any] = {
        "command": "train",
        "model": "amoebanet",
        "variant": "D",
        "layers": 6,
        "filters": 64,
        "dataset": "digits",
        "num_parameters": 1234567,
        "partitions": 4,
        "replicas": 1,
        "micro_batches": 8,
        "batch_size": 64,
        "remat": "full",
        "schedule": "gpipe",
        "device": "cpu",
        "world_size": 4,
        "seed": 0,
    }
    return Summary(**{**known, **facts})


def test_every_field_is_there_and_null_where_it_does_not_apply(tmp_path: Path) -> None:
    path = write_summary(tmp_path / "run", summary(top1=0.975, loss=float("nan")))
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found.keys() >= set(FIELDS)
    assert found.keys() == {field.name for field in dataclasses.fields(Summary)}
    assert found["top1"] == 0.975
    assert [found[name] for name in ("top5", "loss", "bubble_fraction", "peak_memory_bytes_per_rank")] == [None] * 4


def test_screen_shows_percent_and_leaves_out_what_is_not_known() -> None:
    lines = result_lines(summary(top1=0.97512, top5=1.0, loss=0.1234567, num_train=1400, num_eval=397))
    assert "model     amoebanet-D (6, 64), 1,234,567 parameters" in lines
    assert "data      digits, 1,400 train, 397 held out" in lines
    assert "top-1     97.51 %" in lines
    assert "top-5     100.00 %" in lines
    assert "loss      0.1235" in lines
    assert not any(line.startswith(("speed", "time")) for line in lines)
    assert not any("None" in line for line in lines)


def test_one_of_a_thing_is_said_in_the_singular_and_long_times_are_read_at_a_glance() -> None:
    one = result_lines(summary(partitions=1, micro_batches=1, world_size=1, duration_s=59.94, steps=1))
    assert "pipeline  1 partition, 1 micro-batch, remat full, 1 rank on cpu" in one
    assert "time      59.9 s for 1 step" in one
    many = result_lines(summary(duration_s=3723.0, steps=12000))
    assert "pipeline  4 partitions, 8 micro-batches, remat full, 4 ranks on cpu" in many
    assert "time      1:02:03 for 12,000 steps" in many


def test_folder_is_named_by_its_last_part() -> None:
    assert dataset_label("folder", "/some/where/pictures/") == "folder:pictures"
    assert dataset_label("folder", None) == "folder"
    assert dataset_label("cifar10", "/some/where") == "cifar10"
