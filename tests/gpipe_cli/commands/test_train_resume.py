"""Going on with a run: the numbers of the run that was never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.training import checkpoints

# Whatever draws random numbers or keeps state: dropout, drop path, augmentation, momentum and its square, average.
SETTINGS = (
    "dataset.size=48", "dataset.augment=light", "epochs=4", "model.dropout=0.2", "model.drop_path=0.3",
    "ema_decay=0.9", "optimizer=rmsprop", "optimizer.lr=0.01", "micro_batches=2",
)  # fmt: skip
STEPS_PER_EPOCH = 3


@pytest.fixture(scope="module")
def whole(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four epochs in one go."""
    return gpipe.train(tmp_path_factory.mktemp("whole"), *gpipe.tiny, *SETTINGS)


def stopped(gpipe: Any, folder: Path, *words: str) -> Any:
    ended = gpipe.train(folder, *gpipe.tiny, *SETTINGS, *words)
    assert ended.exit_code == 0, ended.stderr
    return ended


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("steps=6", "partitions=2"), ()),
        (("steps=7", "partitions=2", "balance=[2,4]"), ("partitions=4", "workers=2")),
        (("steps=5", "workers=1"), ("partitions=2", "balance=[5,1]", "remat=none")),
    ],
    ids=["after an epoch", "within an epoch, at another K and with workers", "cut for the first time"],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(
    gpipe: Any, whole: Any, tmp_path: Path, first: tuple[str, ...], then: tuple[str, ...]
) -> None:
    before = stopped(gpipe, tmp_path, *first)
    ended = gpipe.train(tmp_path, f"resume={before.run_dir}", "steps=null", *then)
    assert ended.exit_code == 0, ended.stderr
    assert f"resumed from {before.run_dir}/checkpoints/step-" in ended.stderr
    assert ended.steps == whole.steps
    assert ended.evaluations[-1] == whole.evaluations[-1]
    assert gpipe.same_tensors(ended.tensors, whole.tensors)
    kinds = {key.split("/")[0] for key in ended.tensors}
    assert kinds == {"model", "optimizer", "ema"}


@pytest.fixture(scope="module")
def short(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two epochs at a constant rate, finished; tests work on copies."""
    words = ("epochs=2", "lr_schedule=constant", "keep_checkpoints=3", "partitions=2")
    return gpipe.train(tmp_path_factory.mktemp("short"), *gpipe.tiny, *words)


@pytest.fixture
def copy(short: Any, tmp_path: Path) -> Path:
    shutil.copytree(short.folder / "results", tmp_path / "results")
    (run_dir,) = (tmp_path / "results" / "runs").iterdir()
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace(str(short.folder), str(tmp_path)))
    return run_dir


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("resume", ["results/runs/{name}", "auto", "results/runs/{name}/checkpoints/step-00000004"])
def test_a_finished_run_has_nothing_to_do_and_stays_as_it_is(
    gpipe: Any, copy: Path, tmp_path: Path, resume: str
) -> None:
    before = contents(tmp_path)
    words = ("dataset=synthetic",) if resume == "auto" else ()
    ended = gpipe.train(tmp_path, f"resume={resume.format(name=copy.name)}", *words)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.endswith("all 4 steps done, nothing to do; raise epochs to train on\n")
    assert contents(tmp_path) == before


def test_more_epochs_state_both_horizons_and_go_on_where_the_run_ended(gpipe: Any, copy: Path, tmp_path: Path) -> None:
    before = (copy / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").write_bytes(before + b'{"step": 5, "epo')  # killed while it wrote
    ended = gpipe.train(tmp_path, f"resume={copy}", "epochs=4")
    assert ended.exit_code == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "epochs changed" in line]
    assert lines == [
        "epochs changed from 2 to 4: the learning-rate schedule now ends at step 8 (was 4); "
        "rate at step 4: 0.004 (step before: 0.004)"
    ]
    assert (copy / "metrics.jsonl").read_bytes().startswith(before)
    assert [(row["step"], "top1" in row) for row in ended.rows] == [
        (step, evaluated) for step in range(1, 9) for evaluated in ((False, True) if step % 2 == 0 else (False,))
    ]
    in_one_go = gpipe.train(tmp_path / "whole", *gpipe.tiny, "epochs=4", "lr_schedule=constant")
    assert ended.steps == in_one_go.steps
    assert ended.evaluations == in_one_go.evaluations
    assert gpipe.same_tensors(ended.tensors, in_one_go.tensors)
    assert max(lr for _, lr, _ in ended.steps) <= 0.004


def test_an_earlier_checkpoint_can_be_named(gpipe: Any, copy: Path, tmp_path: Path, short: Any) -> None:
    ended = gpipe.train(tmp_path, f"resume={copy}/checkpoints/step-00000002")
    assert ended.exit_code == 0, ended.stderr
    assert ended.rows[:3] == short.rows[:3]
    assert ended.steps == short.steps
    assert gpipe.same_tensors(ended.tensors, short.tensors)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("model.layers=3",), "the run has model.layers=2, not 3; start a new run for that"),
        (("model=amoebanet_b",), "the run has model.variant=D, not B; start a new run for that"),
        (
            ("model=module", "model.factory=a:b"),
            "the run has model.name=amoebanet, not module; start a new run for that",
        ),
        (("seed=1",), "the run has seed=0, not 1; start a new run for that"),
        (("batch_size=8",), "the run has batch_size=16, not 8; start a new run for that"),
        (("optimizer=sgd",), "the run has optimizer.name=adamw, not sgd; start a new run for that"),
        (("ema_decay=0.5",), "the run has ema_decay=0, not 0.5; start a new run for that"),
        (
            ("optimizer.options.amsgrad=true",),
            "the run has optimizer.options.amsgrad=null, not true; start a new run for that",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_would_be_another_run_is_refused(
    gpipe: Any, copy: Path, tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    before = contents(tmp_path)
    resume = f"resume=results/runs/{copy.name}"
    ended = gpipe.train(tmp_path, resume, "epochs=9", *words)
    assert (ended.exit_code, ended.error) == (2, f"{resume}: {problem}")
    assert contents(tmp_path) == before


def test_other_classes_are_refused(gpipe: Any, copy: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    ended = gpipe.train(tmp_path, f"resume={copy}", "epochs=9", "dataset.num_classes=7", "partitions=1")
    assert ended.exit_code == 1
    assert ended.error == (
        f"{copy}/checkpoints/step-00000004: was trained on 10 classes (class0, class1, class2, …), "
        "the data has 7 classes (class0, class1, class2, …): resume needs the same classes"
    )
    assert contents(tmp_path) == before


def test_a_run_of_another_folder_is_not_written_over(gpipe: Any, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 9}\n')
    ended = gpipe.train(tmp_path, f"resume={copy}", "epochs=3", "partitions=1", f"run_dir={other}")
    assert ended.exit_code == 2
    assert ended.error == f"run_dir={other}: already holds a run; choose another folder"
    assert (other / "metrics.jsonl").read_text() == '{"step": 9}\n'


def test_a_run_can_go_on_in_a_new_folder(gpipe: Any, copy: Path, tmp_path: Path) -> None:
    before = contents(copy)
    ended = gpipe.train(tmp_path, f"resume={copy}", "epochs=3", "partitions=1", "run_dir=new")
    assert ended.exit_code == 0, ended.stderr
    assert contents(copy) == before
    assert checkpoints.find_latest(tmp_path / "new" / "checkpoints") == tmp_path / "new/checkpoints/step-00000006"
    assert [path.name for path in (tmp_path / "new" / "best").iterdir()] == ["step-00000006"]


def test_changes_are_told(gpipe: Any, copy: Path, tmp_path: Path) -> None:
    ended = gpipe.train(tmp_path, f"resume={copy}", "epochs=3", "partitions=1", "optimizer.lr=0.001", "dataset.size=64")
    assert ended.exit_code == 0, ended.stderr
    changed = [line for line in ended.stderr.splitlines() if line.startswith("changed: ")]
    assert changed == [
        "changed: dataset.size: 32 -> 64",
        "changed: optimizer.lr: 0.004 -> 0.001",
        "changed: partitions: 2 -> 1",
        "changed: steps in an epoch: 2 -> 4; step 4 now lies in epoch 2",
    ]


def test_a_run_cut_short_says_what_would_make_it_go_on(gpipe: Any, tmp_path: Path) -> None:
    before = gpipe.train(tmp_path, *gpipe.tiny, "epochs=3", "steps=1")
    again = gpipe.train(tmp_path, f"resume={before.run_dir}")
    assert again.exit_code == 0
    assert again.stdout.endswith("all 1 step done, nothing to do; raise steps, or set steps=null, to train on\n")
