"""A run that cannot go on: one line with the cause, exit code 1, and nothing bad on the disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.training import checkpoints, loop
from gpipe_cli.training.metrics import EvalResult


@pytest.mark.parametrize("words", [(), ("partitions=2",)], ids=["one process", "two"])
def test_a_loss_that_is_no_number_stops_the_run_and_spares_the_checkpoints(
    gpipe: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    good = gpipe.train(tmp_path, *gpipe.tiny, "lr_schedule=constant", *words)
    before = {path: path.read_bytes() for path in good.checkpoint.iterdir()}
    bad = gpipe.train(tmp_path, f"resume={good.run_dir}", "epochs=3", "optimizer.lr=1e30")
    assert bad.exit_code == 1
    assert bad.error.startswith("the loss is nan at step 4: stopped, and checkpoints are as they were; ")
    assert {path: path.read_bytes() for path in bad.checkpoint.iterdir()} == before
    assert all(torch.isfinite(tensor).all() for tensor in bad.tensors.values() if tensor.is_floating_point())
    assert [path.name for path in (bad.run_dir / "checkpoints").iterdir()] == [good.checkpoint.name]
    assert all(math.isfinite(loss) for loss in bad.losses)


@pytest.mark.parametrize(
    ("lr", "problem"),
    [
        ("3e38", " is not finite after step 1: no checkpoint is written, earlier ones are as they were; use a "),
        (
            "1e39",
            "the update of step 1 does not fit a weight's type at the learning rate 1e+39: stopped; use a ",
        ),
    ],
)
def test_weights_that_are_not_finite_are_never_saved(gpipe: Any, tmp_path: Path, lr: str, problem: str) -> None:
    words = ("steps=1", "optimizer=sgd", f"optimizer.lr={lr}", "lr_schedule=constant")
    ended = gpipe.train(tmp_path, *gpipe.tiny, *words)
    assert ended.exit_code == 1
    assert problem in ended.error
    assert not (ended.run_dir / "checkpoints").exists()
    assert not (ended.run_dir / "summary.json").exists()


def test_an_epoch_with_a_held_out_loss_of_nan_is_never_the_best(
    gpipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter([(0.2, 1.0), (0.9, math.nan), (0.3, 1.0), (0.25, 1.0)])

    def evaluate(*_: object) -> EvalResult:
        top1, loss = next(results)
        return EvalResult(top1=top1, top5=1.0, loss=loss, num_samples=6)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    ended = gpipe.train(tmp_path, *gpipe.tiny, "epochs=4")
    assert ended.exit_code == 0, ended.stderr
    assert [row["eval_loss"] for row in ended.rows if "top1" in row] == [1.0, None, 1.0, 1.0]
    (best,) = (ended.run_dir / "best").iterdir()
    assert best.name == "step-00000006"
    checkpoints.check_whole(best)
    assert checkpoints.load_facts(ended.checkpoint)["best_score"] == 0.3


def test_a_batch_norm_with_single_values_says_what_to_do(gpipe: Any, tmp_path: Path) -> None:
    source = """
        from torch import nn

        class Late(nn.BatchNorm1d):  # as if a last pooling had left one value a channel
            def forward(self, x):
                return super().forward(x.mean(dim=(2, 3)))

        def layers(num_classes):
            return [("norm", lambda: Late(3)), ("linear", lambda: nn.Linear(3, num_classes))]
    """
    factory = gpipe.network(tmp_path, source)
    ended = gpipe.train(tmp_path, *gpipe.tiny_module, factory, "micro_batches=16", "partitions=2", "balance=[1,1]")
    assert ended.exit_code == 2
    assert ended.error.startswith("micro_batches=16: a micro-batch of 1 sample (batch_size=16, micro_batches=16) gives")


def test_a_full_disk_is_one_line(gpipe: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").symlink_to("/dev/full")
    ended = gpipe.train(tmp_path, *gpipe.tiny, "run_dir=run")
    assert ended.exit_code == 1
    assert ended.error == "run/metrics.jsonl: cannot be written: No space left on device"


def test_a_checkpoint_that_cannot_be_written_is_one_line(gpipe: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    ended = gpipe.train(tmp_path, *gpipe.tiny, "run_dir=run", "partitions=2")
    assert ended.exit_code == 1
    assert ended.error.startswith("run/checkpoints/step-00000002: ")


def test_a_table_that_cannot_be_written_loses_nothing_else(gpipe: Any, tmp_path: Path) -> None:
    (tmp_path / "results" / "accuracy.md").mkdir(parents=True)
    ended = gpipe.train(tmp_path, *gpipe.tiny)
    assert ended.exit_code == 1
    assert "accuracy.md" in ended.error
    assert ended.error.endswith("cannot be written: Is a directory")
    assert ended.summary["steps"] == 2
    assert checkpoints.find_latest(ended.run_dir / "checkpoints") is not None
