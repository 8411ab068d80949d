"""`gpipe train` on text: the same losses for every cut, resumed bit for bit, bad text in one line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

TINY_TEXT = (
    "model=transformer", "model.layers=2", "model.width=16", "model.num_heads=2", "model.ff_width=32",
    "model.seq_len=32", "batch_size=8", "epochs=2", "threads=1", "device=cpu", "log_every=1", "dataset.cache=cache",
    "dataset.path=text.txt",
)  # fmt: skip
SENTENCE = "the pipeline cuts a network into partitions and a batch into micro batches so that all of them work"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    words = SENTENCE.split()
    text = " ".join(words[(index * index + index // 7) % len(words)] for index in range(800))
    (tmp_path / "work" / "text.txt").write_text(text)
    return tmp_path / "work"


def steps_of(lines: list[str]) -> list[tuple[int, float, float]]:
    return [(row["step"], row["lr"], row["loss"]) for row in map(json.loads, lines) if "loss" in row]


def test_losses_do_not_depend_on_the_partitions(gpipe: Any, folder: Path) -> None:
    ends = [gpipe.train(folder, *TINY_TEXT, f"partitions={k}", f"run_dir=k{k}") for k in (1, 2, 4)]
    assert [end.exit_code for end in ends] == [0, 0, 0]
    one, *others = [(folder / f"k{k}" / "metrics.jsonl").read_text().splitlines() for k in (1, 2, 4)]
    assert all(steps_of(one) == steps_of(other) for other in others)
    assert steps_of(one)[-1][2] < steps_of(one)[0][2]


def test_the_row_has_perplexity_and_the_trigram_model(gpipe: Any, folder: Path) -> None:
    ended = gpipe.train(folder, *TINY_TEXT)
    summary = ended.summary
    assert summary["bits_per_byte"] > 0
    assert summary["perplexity"] == pytest.approx(2 ** summary["bits_per_byte"], rel=1e-6)  # a token is a byte
    with (folder / "results" / "accuracy.csv").open() as file:
        (row,) = [row for row in csv.DictReader(file) if row["kind"] == "measured"]
    assert (row["dataset"], row["model"], row["seq_len"], row["image_size"]) == (
        "text:text.txt",
        "transformer",
        "32",
        "",
    )
    assert float(row["bits_per_byte"]) == pytest.approx(summary["bits_per_byte"])
    assert float(row["trigram_bits_per_byte"]) == pytest.approx(summary["trigram_bits_per_byte"])
    assert float(row["tokens_per_s"]) > 0
    assert row["samples_per_s"] == ""
    assert "tokens/s" in ended.stdout
    assert "images" not in ended.stdout + ended.stderr
    assert (ended.run_dir / "curves.png").stat().st_size > 1000


def test_a_run_that_was_stopped_ends_as_one_that_was_not(gpipe: Any, folder: Path) -> None:
    gpipe.train(folder, *TINY_TEXT, "run_dir=whole")
    gpipe.train(folder, *TINY_TEXT, "run_dir=stopped", "steps=7")
    gpipe.train(folder, "resume=stopped", "steps=null", "partitions=2")
    whole, stopped = ((folder / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "stopped"))
    assert steps_of(whole) == steps_of(stopped)


def test_another_text_is_refused_on_resume(gpipe: Any, folder: Path) -> None:
    gpipe.train(folder, *TINY_TEXT, "run_dir=first", "epochs=1")
    (folder / "text.txt").write_text("something else " * 400)
    ended = gpipe.train(folder, "resume=first", "epochs=2")
    assert ended.exit_code == 1
    assert ended.error.endswith(": resume needs the same text")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "dataset.path=text.txt: "),
        (b"good " * 300 + b"\xff\xfe bad", "dataset.path=text.txt: "),
        (b"too short", "dataset.path=text.txt: "),
        (None, "dataset.path=text.txt: "),
    ],
)
def test_text_that_cannot_be_used_is_refused_in_one_line(
    gpipe: Any, folder: Path, content: bytes | None, line: str
) -> None:
    (folder / "text.txt").unlink()
    if content is not None:
        (folder / "text.txt").write_bytes(content)
    ended = gpipe.train(folder, *TINY_TEXT, "partitions=2")
    assert ended.exit_code == 2
    assert ended.error.startswith(line)
    assert not (folder / "results").exists()
