"""What a user gets from `gpipe train`: the run's files, the table, the screen."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.compose import load
from gpipe_cli.config import from_hydra
from gpipe_cli.reporting.run_directory import read_config
from gpipe_cli.training import checkpoints

# DESIGN, section 4.
SUMMARY_FIELDS = (
    "command", "model", "dataset", "num_parameters", "partitions", "replicas", "micro_batches", "batch_size", "remat",
    "schedule", "device", "world_size", "samples_per_s", "step_time_s", "peak_memory_bytes_per_rank",
    "bubble_fraction", "top1", "top5", "loss", "seed", "versions",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two epochs of two steps, at K = 2."""
    words = ("partitions=2", "micro_batches=3", "epochs=2", "seed=7", "tensorboard=true")
    return gpipe.train(tmp_path_factory.mktemp("run"), *gpipe.tiny, *words)


def test_a_run_succeeds_and_says_what_it_did(run: Any) -> None:
    assert run.exit_code == 0, run.stderr
    assert "amoebanet: 6,870 parameters in 6 layers, cut " in run.stderr
    assert "2 ranks on cpu, 1 thread each" in run.stderr
    assert "synthetic: 32 training and 6 held-out samples, 10 classes; run in results/runs/" in run.stderr
    shown = dict(line.split(maxsplit=1) for line in run.stdout.splitlines())
    assert list(shown) == ["model", "data", "pipeline", "top-1", "top-5", "loss", "speed", "time", "table", "run"]
    assert shown["pipeline"] == "2 partitions, 3 micro-batches, remat full, 2 ranks on cpu"
    assert shown["time"].endswith(" for 4 steps")
    assert Path(run.folder, shown["run"]) == run.run_dir
    assert "warn" not in run.stderr.lower()


def test_singular_forms_on_the_screen(gpipe: Any, tmp_path: Path) -> None:
    words = ("steps=1", "micro_batches=1", "progress=none")
    ended = gpipe.train(tmp_path, *gpipe.tiny, *words)
    assert "pipeline  1 partition, 1 micro-batch, remat full, 1 rank on cpu\n" in ended.stdout
    assert re.search(r"^time +[\d.]+ s for 1 step$", ended.stdout, re.MULTILINE)
    assert ended.stderr == ""


def test_plain_lines_are_rare(run: Any) -> None:
    assert len([line for line in run.stderr.splitlines() if line.startswith("step ")]) <= 4
    assert "step 4/4  loss " in run.stderr
    assert len([line for line in run.stderr.splitlines() if line.startswith("epoch ")]) == 2


def test_the_summary_has_every_field_with_true_values(run: Any) -> None:
    summary = run.summary
    assert summary.keys() >= set(SUMMARY_FIELDS)
    stated = {key: summary[key] for key in SUMMARY_FIELDS[:12]}
    assert stated == {
        "command": "train", "model": "amoebanet", "dataset": "synthetic", "num_parameters": 6870, "partitions": 2,
        "replicas": 1, "micro_batches": 3, "batch_size": 16, "remat": "full", "schedule": "gpipe", "device": "cpu",
        "world_size": 2,
    }  # fmt: skip
    assert summary["samples_per_s"] > 0
    assert summary["samples_per_s"] * summary["step_time_s"] == pytest.approx(16)
    assert len(summary["peak_memory_bytes_per_rank"]) == 2
    assert all(2**20 < peak < 2**36 for peak in summary["peak_memory_bytes_per_rank"])
    assert 0 <= summary["bubble_fraction"] <= 1
    assert (summary["epochs"], summary["steps"], summary["seed"]) == (2, 4, 7)
    assert summary["versions"]["torch"] == torch.__version__
    assert (summary["top1"], summary["loss"]) == run.evaluations[-1][1:]
    assert 0 <= summary["top1"] <= summary["top5"] <= 1
    assert summary["train_loss"] == run.losses[-1]


def test_metrics_have_a_row_a_step_and_an_evaluation(run: Any) -> None:
    places = [(row["step"], row["epoch"], "top1" in row) for row in run.rows]
    assert places == [(1, 0, False), (2, 0, False), (2, 0, True), (3, 1, False), (4, 1, False), (4, 1, True)]
    assert all(row["samples_per_s"] > 0 and row["lr"] > 0 for row in run.rows if "loss" in row)
    assert [row["num_eval"] for row in run.rows if "top1" in row] == [6, 6]
    assert run.losses[0] == pytest.approx(math.log(10), abs=1.0)


def test_the_configuration_can_be_read_back(run: Any, gpipe: Any) -> None:
    stored = read_config(run.run_dir)
    assert stored is not None
    words = [*gpipe.tiny, "partitions=2", "micro_batches=3", "epochs=2", "seed=7", "tensorboard=true"]
    assert from_hydra("train", stored) == load("train", words)


def test_pictures_and_events_are_there(run: Any) -> None:
    assert (run.run_dir / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert any((run.run_dir / "tensorboard").iterdir())
    names = {path.name for path in run.run_dir.iterdir()}
    assert names == {
        "best", "checkpoints", "config.yaml", "curves.png", "metrics.jsonl", "summary.json", "tensorboard"
    }  # fmt: skip


def test_the_checkpoint_holds_plain_facts_and_the_whole_network(run: Any) -> None:
    facts = checkpoints.load_facts(run.checkpoint)
    assert (facts["step"], facts["num_parameters"], len(facts["layers"])) == (4, 6870, 6)
    assert facts["data"]["classes"] == [f"class{label}" for label in range(10)]
    assert json.dumps(facts)
    weights = {key: value for key, value in run.tensors.items() if key.startswith("model/")}
    assert {key.split("/")[1].split(".")[0] for key in weights} == set(facts["layers"])


def test_the_table_has_a_row_with_the_command(run: Any) -> None:
    table = (run.folder / "results" / "accuracy.md").read_text()
    (row,) = [line for line in table.splitlines() if "measured" in line and line.startswith("|")]
    assert "| synthetic |" in row
    assert f"{100 * run.summary['top1']:.2f}" in row
    assert (run.folder / "results" / "accuracy.csv").exists()


def test_a_run_cut_short_by_steps_touches_no_table(gpipe: Any, tmp_path: Path) -> None:
    ended = gpipe.train(tmp_path, *gpipe.tiny, "steps=1")
    assert ended.exit_code == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["runs"]
    assert "table" not in ended.stdout
    assert (ended.summary["steps"], ended.summary["samples_per_s"]) == (1, None)  # the first step is start-up


def test_no_epochs_evaluates_the_initial_weights(gpipe: Any, tmp_path: Path) -> None:
    ended = gpipe.train(tmp_path, *gpipe.tiny, "epochs=0")
    assert ended.exit_code == 0, ended.stderr
    assert ended.losses == []
    assert math.isfinite(ended.summary["loss"])
    assert "before training: top-1" in ended.stderr
    assert "evaluation only" in ended.stdout
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["runs"]


def test_runs_of_one_day_get_folders_of_their_own(gpipe: Any, tmp_path: Path) -> None:
    gpipe.train(tmp_path, *gpipe.tiny, "epochs=0")
    gpipe.train(tmp_path, *gpipe.tiny, "epochs=0")
    names = sorted(path.name for path in (tmp_path / "results" / "runs").iterdir())
    assert [re.sub(r"^\d{4}-\d\d-\d\d", "DATE", name) for name in names] == [
        "DATE-train-amoebanet-synthetic-1",
        "DATE-train-amoebanet-synthetic-2",
    ]
