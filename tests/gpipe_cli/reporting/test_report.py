"""One call, and the number is on the screen, in the metrics and in TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_cli.errors import TrainingError
from gpipe_cli.reporting.jsonl import read_rows
from gpipe_cli.reporting.report import RunReport
from gpipe_cli.training.metrics import EvalResult

RESULT = EvalResult(top1=0.5, top5=1.0, loss=1.25, num_samples=1200)


def report(run_dir: Path, resumed_from: int | None = None) -> RunReport:
    return RunReport(run_dir, progress="plain", num_steps=4, resumed_from=resumed_from, tensorboard=False)


def test_rows_are_kept_and_lines_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report(tmp_path)
    run.message("a note")
    run.step(1)  # shown only
    run.step(4, {"step": 4, "epoch": 1, "loss": 2.0, "lr": 0.1, "samples_per_s": 100.0})
    run.evaluation(4, 1, RESULT)
    run.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 4, "epoch": 1, "loss": 2.0, "lr": 0.1, "samples_per_s": 100.0},
        {"step": 4, "epoch": 1, "top1": 0.5, "top5": 1.0, "eval_loss": 1.25, "num_eval": 1200},
    ]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "a note"
    assert lines[1].startswith("step 1/4")
    assert lines[2].startswith("step 4/4  loss 2.0000  100 images/s")
    assert lines[3] == "epoch 2: top-1 50.00 %, top-5 100.00 %, loss 1.2500 on 1,200 held-out samples"


def test_an_evaluation_before_any_training_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = report(tmp_path)
    run.evaluation(0, -1, RESULT)
    run.close()
    assert capsys.readouterr().err.startswith("before training: top-1 50.00 %")


def test_a_resumed_run_goes_on_after_its_last_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n{"ste')
    run = report(tmp_path, resumed_from=2)
    run.step(3, {"step": 3, "loss": 1.0, "samples_per_s": 1.0})
    run.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full (Linux)")
def test_a_full_disk_is_one_line_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run = report(tmp_path)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: cannot be written: No space left on device"):
        run.step(1, {"step": 1, "loss": 1.0, "samples_per_s": 1.0})
    with pytest.raises(TrainingError, match="No space left on device"):
        run.close()  # the row that is still in memory; nothing else
