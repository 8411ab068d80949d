"""`gpipe plan` from the command line: what it prints, writes and refuses. Needs no accelerator and computes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpipe_cli.cli import main

TINY = (
    "model=amoebanet", "model.split_cells=false", "model.layers=3", "model.filters=8", "image_size=32",
    "batch_size=16", "hardware=p40",
)  # fmt: skip


def plan(*words: str) -> int:
    return main(["plan", *words])


def test_a_plan_is_printed_and_nothing_is_written(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert plan(*TINY, "partitions=2", "micro_batches=4") == 0
    text = capsys.readouterr().out
    assert "SIMULATED for 2 accelerators of hardware=p40" in text
    assert "samples/s (simulated)" in text
    assert list(tmp_path.iterdir()) == []


def test_auto_chooses(capsys):
    assert plan(*TINY, "accelerators=3") == 0
    assert ": fits" in capsys.readouterr().out


def test_cut_time_says_that_times_are_measured(capsys):
    words = (*TINY[:-1], "hardware=cpu", "partitions=1", "micro_batches=2", "threads=1")
    assert plan(*words) == 0
    assert "MEASURED" not in capsys.readouterr().out
    assert plan(*words, "cut=time") == 0
    assert "times: of one micro-batch, MEASURED here" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_says_what_to_change_and_succeeds(capsys):
    assert plan(*TINY, "partitions=2", "micro_batches=1", "remat=none", "hardware.memory_gb=0.606") == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "it would fit with\n" in text


def test_a_suite_prints_and_writes_its_table(tmp_path: Path, capsys):
    assert plan("suite=torchgpipe", f"results_dir={tmp_path}") == 0
    text = capsys.readouterr().out
    assert "torchgpipe, amoebanet on p40: SIMULATED beside reported" in text
    assert "K=8 M=32" in text
    assert {path.name for path in tmp_path.iterdir()} == {"plan.csv", "plan.md"}


def test_the_simulated_timeline_is_drawn(tmp_path: Path, capsys):
    assert plan(*TINY, "partitions=2", "micro_batches=4", f"timeline={tmp_path / 'step.png'}") == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert plan(*TINY, "partitions=2", "micro_batches=4", f"timeline={tmp_path / 'step.json'}") == 0
    assert "traceEvents" in json.loads((tmp_path / "step.json").read_text())
    assert "step.json" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "start"), [
    (["suite=nonsense"], "gpipe: error: suite=nonsense: choose one of table1"),
    (["hardware=abacus"], "gpipe: error: hardware=abacus: choose one of a100"),
    ([*TINY, "partitions=99", "micro_batches=1"], "gpipe: error: partitions=99: the network has 9 layers"),
    ([*TINY, "micro_batches=99"], "gpipe: error: micro_batches=99: there are only batch_size=16 samples"),
    ([*TINY, "partitions=2", "balance=[1,1]"], "gpipe: error: balance=[1,1]: sums to 2, the network has"),
    (["suite=table2", "batch_size=16"], "gpipe: error: micro_batches=32: there are only batch_size=16 samples"),
    (["model=module"], "gpipe: error: model.factory=null: model=module needs"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(words, start, capsys):
    assert plan(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(start) or "layers to share out" in captured.err


def test_bf16_is_faster_where_there_are_units_for_it(capsys):
    def step(precision: str) -> str:
        assert plan(*TINY, "hardware=h100", "partitions=1", "micro_batches=1", f"precision={precision}") == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if line.startswith("step")).split()[1]

    assert float(step("bf16")) < float(step("fp32"))
