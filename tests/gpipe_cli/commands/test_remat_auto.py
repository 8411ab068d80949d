"""remat=auto on the command lines: train, bench and plan keep the same, and results are those of every other remat."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.benchmark.grid import Case, grid
from gpipe_cli.benchmark.survey import survey
from gpipe_cli.compose import load
from gpipe_cli.pipeline import make_schedule
from gpipe_cli.pipeline.schedule import num_not_recomputed
from gpipe_cli.planning import cpu
from gpipe_cli.planning.network import make_planner
from gpipe_cli.planning.planner import Plan
from gpipe_cli.training.rematerialization import GB, PROCESS_BYTES

SOURCE = """
    from functools import partial
    from torch import nn

    def block(width):
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2))

    def layers(num_classes, width=8):
        blocks = [(f"block_{index}", partial(block, width)) for index in range(8)]
        stem = ("stem", partial(nn.Conv2d, 3, width, 1))
        return [stem, *blocks, ("flat", nn.Flatten), ("head", partial(nn.Linear, 64 * width, num_classes))]
"""
SIZES = ("image_size=8", "batch_size=16", "threads=1", "optimizer=adamw")
PIPELINES = {
    "gpipe": ("partitions=2", "micro_batches=4"),
    "gpipe, 3 partitions in 2 ranks": ("partitions=3", "micro_batches=4", "ranks=2", "schedule=gpipe"),
    "1f1b": ("partitions=3", "micro_batches=4", "schedule=1f1b"),
    "interleaved": ("partitions=4", "micro_batches=4", "ranks=2", "schedule=interleaved"),
}


@pytest.fixture
def network(gpipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The settings of a network whose stages are about equal, for train; plan and bench need its classes as well."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return (*SIZES, "model=module", gpipe.network(tmp_path, SOURCE))


@pytest.fixture
def plan(network: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """`gpipe plan hardware=cpu remat=auto` without its second of measuring: what is kept does not depend on speed."""
    monkeypatch.setattr(cpu, "measure", lambda *_: cpu.Rates(1e9, 1e9, 1e9, 1e-6, 1e9, 1e-5))

    def evaluated(pipeline: tuple[str, ...], memory_gb: float) -> Plan:
        words = [*network, "num_classes=10", *pipeline, "hardware=cpu", "remat=auto"]
        planner = make_planner(load("plan", [*words, f"hardware.memory_gb={memory_gb}"]))
        return planner.evaluate(planner.first_choice())

    return evaluated


@pytest.fixture
def budget(plan: Callable[..., Plan]) -> Callable[..., float]:
    """`budget(pipeline, share)`: GB, so far from what everything recomputed needs to what everything kept does."""

    def between(pipeline: tuple[str, ...], share: float) -> float:
        nothing, everything = (max(plan(pipeline, memory_gb).memory_bytes_per_rank) for memory_gb in (0.5, 2))
        return math.ceil(PROCESS_BYTES + nothing + share * (everything - nothing)) / GB

    return between


def bench_words(network: tuple[str, ...], *words: str) -> list[str]:
    # Cut as plans are: by counted costs.
    own = ("num_classes=10", "device=cpu", "steps=1", "rounds=1", "baseline=null", "progress=none", "cut=flops")
    return [*network, *own, *words]


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_bench_and_plan_keep_the_same(network: Any, plan: Any, budget: Any, pipeline: tuple[str, ...]) -> None:
    different = set()
    for share in (0.1, 0.6, 1):
        memory_gb = budget(pipeline, share)
        planned = plan(pipeline, memory_gb)
        assert planned.fits
        settings = load("bench", bench_words(network, *pipeline, "remat=auto", f"memory_gb={memory_gb}"))
        [case] = survey(settings, grid(settings))
        ranks = settings.ranks or case.partitions
        schedule = make_schedule(case.partitions, 4, case.schedule, "auto", ranks, case.kept)
        assert schedule.operations == planned.schedule.operations
        different.add(schedule.rematerialized)
    assert len(different) > 1
    assert frozenset() in different


def test_train_keeps_what_plan_does_and_its_results_do_not_depend_on_it(
    gpipe: Any, tmp_path: Path, network: Any, plan: Any, budget: Any
) -> None:
    def trained(*words: str) -> Any:
        settings = (*gpipe.tiny_module, *network, *PIPELINES["gpipe"])
        return gpipe.train(tmp_path / words[0], *settings, *words)

    memory_gb = budget(PIPELINES["gpipe"], 0.6)
    kept = num_not_recomputed(plan(PIPELINES["gpipe"], memory_gb).schedule)
    assert 2 < sum(kept) < 8  # one is fresh on each stage
    auto = trained("remat=auto", f"memory_gb={memory_gb}")
    assert auto.exit_code == 0, auto.stderr
    assert f"remat=auto keeps {'+'.join(map(str, kept))} of 4 micro-batches, counted to take " in auto.stderr
    assert f" of {memory_gb:.2f} GB a rank (memory_gb)" in auto.stderr
    assert (auto.summary["remat"], auto.summary["kept"]) == ("auto", list(kept))
    for other in (trained("remat=none"), trained("remat=full")):
        assert other.summary["kept"] is None
        assert auto.steps == other.steps
        assert auto.evaluations == other.evaluations
        assert gpipe.same_tensors(auto.tensors, other.tensors)


def test_without_a_number_the_machines_memory_is_used(gpipe: Any, tmp_path: Path) -> None:
    ended = gpipe.train(tmp_path, *gpipe.tiny, "remat=auto", "steps=1")
    assert ended.exit_code == 0, ended.stderr
    assert "remat=auto keeps 4 of 4 micro-batches" in ended.stderr
    assert " GB a rank (this machine's memory, shared out; memory_gb sets another)" in ended.stderr


@pytest.mark.parametrize(("words", "line"), [
    (("remat=auto", "memory_gb=0.4"), "memory_gb=0.4: rank 0 needs 0.501 GB even if everything is recomputed"),
    (("remat=full", "memory_gb=8"), "memory_gb=8: is what remat=auto fills, but remat=full; add remat=auto, or leave"),
    (("memory_gb=8",), "memory_gb=8: is what remat=auto fills, but remat=full"),
    (("remat=auto", "memory_gb=0"), "memory_gb=0: expected a number, more than 0, or null"),
    (("remat=auto", "partitions=7", "ranks=1"), "partitions=7: "),
    (("remat=auto", "partitions=2", "balance=[2,2]"), "balance=[2,2]: sums to 4, the network has 6 layers"),
    (("remat=auto", "partitions=3", "ranks=2", "schedule=interleaved"), "schedule=interleaved: 3 stages cannot be"),
])  # fmt: skip
def test_what_cannot_be_is_one_line_and_writes_nothing(gpipe: Any, tmp_path: Path, words: Any, line: str) -> None:
    folder = tmp_path / "empty"
    ended = gpipe.train(folder, *gpipe.tiny, *words)
    assert ended.exit_code == 2
    assert ended.error.startswith(line)
    assert len(ended.stderr.splitlines()) == 1
    assert list(folder.iterdir()) == []


def measured(folder: Path, table: str) -> dict[str, dict[str, str]]:
    """The measured rows of a table by their remat."""
    with (folder / "results" / table).open(newline="") as file:
        return {row["remat"]: row for row in csv.DictReader(file) if row["kind"] == "measured"}


def test_bench_measures_it_beside_the_others_and_says_what_is_kept(
    gpipe: Any, tmp_path: Path, network: Any, plan: Any, budget: Any
) -> None:
    memory_gb = budget(PIPELINES["gpipe"], 0.6)
    words = bench_words(network, *PIPELINES["gpipe"], "remat=[full,auto]", f"memory_gb={memory_gb}")
    ended = gpipe.run("bench", tmp_path, *words)
    assert ended.exit_code == 0, ended.stderr
    kept = num_not_recomputed(plan(PIPELINES["gpipe"], memory_gb).schedule)
    assert f" auto {'+'.join(map(str, kept))} " in ended.stdout
    full, auto = (measured(tmp_path, "throughput.csv")[remat] for remat in ("full", "auto"))
    assert (full["kept"], full["num_rematerializations"]) == ("", "6")
    assert (auto["kept"], auto["num_rematerializations"]) == (" ".join(map(str, kept)), str(8 - sum(kept)))
    held = {remat: int(row["activation_bytes"]) for remat, row in measured(tmp_path, "memory.csv").items()}
    assert held["full"] < held["auto"]


def test_a_row_whose_budget_is_too_small_is_not_measured(network: Any) -> None:
    settings = load("bench", bench_words(network, *PIPELINES["gpipe"], "remat=[auto,none]", "memory_gb=0.4"))
    small, other = survey(settings, grid(settings))
    assert str(small).startswith("K=2 M=4 remat=auto: memory_gb=0.4: rank ")
    assert isinstance(other, Case)


def test_a_budget_that_no_row_on_a_cpu_uses_is_refused(gpipe: Any, tmp_path: Path, network: Any) -> None:
    ended = gpipe.run("bench", tmp_path, *bench_words(network, "remat=full", "memory_gb=8"))
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.error == (
        "memory_gb=8: limits a GPU's memory, and on a CPU what remat=auto keeps; leave it out, or add auto to remat"
    )
