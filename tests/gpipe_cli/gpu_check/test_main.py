"""`make gpu-check`: exit codes, what is written, and what is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpipe_cli.distributed import devices
from gpipe_cli.gpu_check import __main__ as command
from gpipe_cli.gpu_check import runner
from gpipe_cli.gpu_check.record import FAILED, MEASURED, NOT_MEASURED, Part, Row, Section
from gpipe_cli.gpu_check.sizes import FULL, TINY
from gpipe_cli.gpu_check.worker import Facts


class FakeRunner:
    """In place of processes on a GPU: every check has the same outcome."""

    outcome = MEASURED
    seen: tuple[object, ...] = ()

    def __init__(self, device: str, sizes: object, show: object) -> None:
        type(self).seen = (device, sizes)
        self.facts = Facts("Test GPU, 8.0 GB", "CUDA 13.0, cuDNN 9")

    def run(self, parts: Sequence[Part]) -> list[Section]:
        if self.outcome == "interrupted":
            raise KeyboardInterrupt
        return [Section(part, [Row(check.label, self.outcome) for check in part.checks], 1.0) for part in parts]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "Runner", FakeRunner)
    return tmp_path


def with_gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: number)


def test_without_a_gpu_one_line_and_exit_code_2_and_the_page_is_left_as_it_is(folder, monkeypatch, capsys) -> None:
    with_gpus(monkeypatch, 0)
    (folder / "results").mkdir()
    (folder / "results" / "gpu.md").write_text("as it was")
    assert command.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("gpu-check: error: no CUDA GPU that PyTorch can use was found; results/gpu.md is left as it is\n")
    assert (folder / "results" / "gpu.md").read_text() == "as it was"


@pytest.mark.parametrize(("outcome", "exit_code"), [(MEASURED, 0), (NOT_MEASURED, 0), (FAILED, 1)])
def test_a_run_writes_the_page_whatever_came_of_its_rows(folder, monkeypatch, capsys, outcome, exit_code) -> None:
    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(FakeRunner, "outcome", outcome)
    assert command.main(["--results-dir", "there"]) == exit_code
    assert FakeRunner.seen == ("cuda:0", FULL)
    text = (folder / "there" / "gpu.md").read_text()
    assert "- machine: Test GPU, 8.0 GB" in text
    assert "- date: " in text
    assert f"| {outcome} |" in text
    assert capsys.readouterr().out.endswith("page there/gpu.md\n")


def test_an_interrupted_run_leaves_the_page_as_it_is(folder, monkeypatch, capsys) -> None:
    with_gpus(monkeypatch, 1)
    monkeypatch.setattr(FakeRunner, "outcome", "interrupted")
    assert command.main([]) == 130
    assert capsys.readouterr().err == "gpu-check: interrupted\n"
    assert list(folder.iterdir()) == []


def test_a_dry_run_writes_nothing_and_says_that_nothing_is_a_result(folder, capsys) -> None:
    assert command.main(["--dry-run"]) == 0
    assert FakeRunner.seen == ("cpu", TINY)
    out = capsys.readouterr().out
    assert out.startswith("dry run at tiny sizes: nothing below is a result, and nothing is written\n")
    assert out.endswith("nothing was written\n")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--device", "cpu"], "--device is for --dry-run: results are measured on a CUDA GPU only"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--dry-run", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, words, problem) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"gpu-check: error: {problem}")
    assert err.count("\n") == 1


def test_results_that_are_no_folder_are_refused_before_anything_is_measured(folder, monkeypatch, capsys) -> None:
    with_gpus(monkeypatch, 1)
    (folder / "results").write_text("a file")
    assert command.main([]) == 2
    assert capsys.readouterr().err == "gpu-check: error: --results-dir=results: is no folder; give another one\n"
