"""Every part's code runs, here on a CPU at tiny sizes, and finds what is wrong where something is."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable

import pytest
import torch

from gpipe_cli.gpu_check import engine, largest, precision, prediction, throughput
from gpipe_cli.gpu_check.place import Place, is_out_of_memory, strict_numerics
from gpipe_cli.gpu_check.record import MEASURED, PASSED, Part, Row
from gpipe_cli.gpu_check.runner import Runner
from gpipe_cli.gpu_check.sizes import FULL, TINY
from gpipe_cli.gpu_check.worker import attempt
from gpipe_cli.pipeline import stage
from gpipe_cli.pipeline.batchnorm import BatchNormStatistics


@pytest.fixture
def place() -> Place:
    return Place(torch.device("cpu"), TINY, time.monotonic() + 300)


def rows_of(place: Place, part: Part, wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Row]:
    rows = [attempt(place, part, n)[0] for n, check in enumerate(part.checks) if wanted(check.label)]
    assert rows
    return {row.label: row for row in rows}


def test_the_engine_equals_plain_pytorch_for_every_cut(place: Place) -> None:
    rows = rows_of(place, engine.part())
    assert {row.verdict for row in rows.values()} == {PASSED}
    assert len(rows) == 2 * 3 * 2 + 5
    for label, row in rows.items():
        recomputed = row.cells.get("recomputations a step")
        if "remat=none" in label:
            assert recomputed == "0"
        if "K=4, remat=full" in label and recomputed is not None:
            assert int(recomputed) > 0
        assert row.cells.keys() <= set(engine.part().columns)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("dropout", "differ from plain PyTorch (allowed: 1e-09): losses by"),
        ("statistics", "differ from plain PyTorch (allowed: 1e-09): running statistics by"),
        ("random state", "a random generator was left in another state"),
        ("recomputation", "0 recomputations in a step, expected 7"),
    ],
)
def test_the_engine_part_fails_when_the_engine_is_broken(
    place: Place, broken: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "dropout":  # draws that depend on what was drawn before
        monkeypatch.setattr(stage, "seed_generators", lambda device, seed: None)
    elif broken == "statistics":  # which never move
        monkeypatch.setattr(BatchNormStatistics, "commit", BatchNormStatistics.discard)
    elif broken == "random state":
        monkeypatch.setattr("gpipe_cli.pipeline.engine.preserved_generators", contextlib.nullcontext)
    else:  # which is not counted
        monkeypatch.setattr("gpipe_cli.pipeline.engine.Pipeline._num_rematerializations", lambda self: 0)
    (row,) = rows_of(place, engine.part(), lambda label: label == "float64, gpipe, K=2, remat=full").values()
    assert row.verdict.startswith(f"failed: {problem}")


def test_mixed_precision_puts_every_dtype_in_its_place(place: Place) -> None:
    rows = rows_of(place, precision.part(), lambda label: "remat=full" in label)
    assert {row.verdict for row in rows.values()} == {PASSED}
    assert [row.cells["between stages"] for row in rows.values()] == ["", "bfloat16", "bfloat16"]


def test_mixed_precision_fails_without_autocast(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    original = precision.make_pipeline

    def without(*args: object, **options: object) -> object:
        return original(*args, **{**options, "autocast": None})  # type: ignore[arg-type]

    monkeypatch.setattr(precision, "make_pipeline", without)
    (row,) = rows_of(place, precision.part(), lambda label: "K=2, remat=none" in label).values()
    assert row.verdict == "failed: between stages: ['torch.float32'], expected bfloat16"


def test_table_1_finds_the_largest_size_below_the_cap(place: Place) -> None:
    rows = rows_of(place, largest.part(TINY))
    assert {row.outcome for row in rows.values()} == {MEASURED}
    found = {label: (row.cells["(L, D)"], row.cells.get("does not train")) for label, row in rows.items()}
    assert found["Naive-1, largest D for L=2, bf16"] == ("(2, 4)", "(2, 8)")
    assert found["Pipeline-1, largest D for L=2, fp32"] == ("(2, 4)", "(2, 8)")
    assert found["Naive-1, largest D for L=2, fp32"] == ("below (2, 4)", "(2, 4)")
    assert rows["Naive-1, the paper's size"].cells["trains"] == "no: out of memory"
    assert rows["Pipeline-1, largest D for L=2, fp32"].cells["parameters"] == "6,870"


def test_table_1_does_not_start_a_search_that_has_no_time_and_says_when_one_was_cut_short(place: Place) -> None:
    hasty = Place(place.device, dataclasses.replace(TINY, search_s=-1.0), place.deadline)
    (row,) = rows_of(hasty, largest.part(TINY), lambda label: "Naive-1, largest L" in label).values()
    assert row.verdict == "not measured: no time was left for the first trial"


def test_the_papers_sizes_are_where_the_searches_start() -> None:
    for layers, filters in (FULL.naive, FULL.pipeline):
        assert layers in FULL.layers
        assert filters in FULL.filters


def test_predicted_activations_are_those_that_are_counted(place: Place) -> None:
    rows = rows_of(place, prediction.part(), lambda label: "K=2" in label)
    assert {row.verdict for row in rows.values()} == {PASSED}
    assert all(0.9 < float(row.cells["predicted / counted"]) < 1.1 for row in rows.values())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at them all
def test_throughput_of_the_loop_the_pipeline_and_compiled_layers() -> None:
    wanted = (
        "ordinary loop, channels-last, bf16", "pipeline, channels-last, bf16", "pipeline, nchw, fp32",
        "ordinary loop, channels-last, bf16, compiled",
    )  # fmt: skip
    part = throughput.part(TINY)
    checks = tuple(check for check in part.checks if check.label in wanted)
    runner = Runner("cpu", TINY, lambda part, row: None, start_method="fork")  # the compiler stays out of this process
    [section] = runner.run([dataclasses.replace(part, checks=checks)])
    rows = {row.label: row for row in section.rows}
    assert {row.verdict for row in rows.values()} == {MEASURED}
    assert set(rows) == set(wanted)
    for row in rows.values():
        assert float(row.cells["from"]) <= float(row.cells["step, ms"]) <= float(row.cells["to"])
        assert row.cells.keys() <= set(part.columns)
    assert rows[wanted[0]].cells["x the loop"] == "1.00"
    assert rows[wanted[2]].cells["x the loop"] == ""  # its loop was not measured


def test_memory_that_libraries_lack_counts_as_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("GET was unable to find an engine to execute this computation"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_out_of_memory(ValueError("ALLOC_FAILED"))


def test_strict_numerics_last_as_long_as_asked_for() -> None:
    before = (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.deterministic)
    with strict_numerics():
        assert (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.deterministic) == ("ieee", True)
    assert (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.deterministic) == before
