"""Saving: a checkpoint is whole or not there, whatever happens meanwhile, and from any number of ranks."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpipe_cli.errors import CheckpointError, TrainingError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.checkpoints import find_latest, load, load_facts, save


def test_last_ones_stay_and_the_newest_is_found(made: Any, tmp_path: Path) -> None:
    assert find_latest(tmp_path / "absent") is None
    assert find_latest(tmp_path) is None
    for step in (5, 10, 200):
        made.save(tmp_path, step, keep=2)
    assert made.names(tmp_path) == ["step-00000010", "step-00000200"]
    assert find_latest(tmp_path) == tmp_path / "step-00000200"
    with pytest.raises(ValueError, match="keep"):
        made.save(tmp_path, 300, keep=0)


def test_a_step_saved_again_replaces_the_earlier_checkpoint(made: Any, tmp_path: Path) -> None:
    made.save(tmp_path, 7)
    path = save(tmp_path, 7, {"new": torch.ones(1)}, {}, keep=2)
    assert made.names(tmp_path) == [path.name]
    assert list(load(path)) == ["new"]


def test_checkpoints_of_an_abandoned_continuation_do_not_outlive_the_new_one(made: Any, tmp_path: Path) -> None:
    for step in (100, 200, 300):
        made.save(tmp_path, step, keep=3)
    made.save(tmp_path, 150, keep=2)
    assert made.names(tmp_path) == ["step-00000100", "step-00000150"]


def test_leftovers_are_ignored_and_removed_by_the_next_save(made: Any, tmp_path: Path) -> None:
    made.save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".tmp-step-00000009")
    assert find_latest(tmp_path) == tmp_path / "step-00000001"
    made.save(tmp_path, 2)
    assert made.names(tmp_path) == ["step-00000001", "step-00000002"]


def test_damaged_checkpoint_does_not_count_among_those_kept(made: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made.save(tmp_path, step, keep=3)
    data = tmp_path / "step-00000003" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-10])
    made.save(tmp_path, 4, keep=2)
    assert {"step-00000002", "step-00000004"} <= set(made.names(tmp_path))
    assert "step-00000001" not in made.names(tmp_path)


def _save_own_layers(made: Any, directory: Path, step: int, separate_group: bool) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo") if separate_group else None
    # Whole layers a rank, as stages have them; the last of three ranks has nothing of its own.
    own = {
        key: value for key, value in made.tensors(step).items() if int(key.split("cell")[1][0]) % min(size, 2) == rank
    }
    facts = {**made.facts, "step": step} if rank == 0 else {"not": "written"}
    return str(save(directory, step, own, facts, keep=2, process_group=group))


@pytest.mark.parametrize(("num_ranks", "separate_group"), [(2, False), (3, True)])
def test_ranks_with_different_keys_save_one_checkpoint_that_any_process_loads(
    made: Any, num_ranks: int, separate_group: bool, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    for step in (3, 4):
        paths = run_ranks(num_ranks, _save_own_layers, made, tmp_path / "run", step, separate_group)
        assert set(paths) == {str(tmp_path / "run" / f"step-{step:08d}")}
        made.assert_holds(Path(paths[0]), step)
    assert len(list(Path(paths[0]).glob("*.distcp"))) == num_ranks


def _fails_on_one_rank(made: Any, directory: Path) -> str:
    if dist.get_rank() == 1:
        os.fsync = _no_space
    try:
        _save_own_layers(made, directory, 2, separate_group=False)
    except CheckpointError as error:
        return str(error)
    return "saved"


def _no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_when_one_rank_cannot_write_all_say_so_and_the_earlier_checkpoint_stays(
    made: Any, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    directory = tmp_path / "run"
    made.save(directory, 1)
    messages = run_ranks(2, _fails_on_one_rank, made, directory)
    assert all("No space left on device" in message and "\n" not in message for message in messages)
    assert made.names(directory) == ["step-00000001"]
    made.assert_holds(directory / "step-00000001", 1)


def _killed_at(made: Any, event: int, run_dir: Path, step: int) -> None:
    """Save in this process and kill it, as `kill -9` does, before the event-th call that makes something lasting."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == event:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "mkdir", "link", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    made.save(run_dir / "checkpoints", step, keep=1, best=run_dir / "best")


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_killed_at_any_moment_a_whole_checkpoint_is_found_and_the_next_save_cleans_up(
    made: Any, again: bool, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    step = 1 if again else 2
    outcomes = set()
    for event in range(1, 100):
        folders = [tmp_path / str(event) / name for name in ("checkpoints", "best")]
        made.save(folders[0], 1, keep=1, best=folders[1])
        process = context.Process(target=_killed_at, args=(made, event, tmp_path / str(event), step))
        process.start()
        process.join()
        steps = []
        for folder in folders:
            latest = find_latest(folder)
            assert latest is not None
            steps.append(load_facts(latest)["step"])
            assert steps[-1] in (1, step)
            made.assert_holds(latest, steps[-1])
            for path in folder.iterdir():  # whatever looks like a checkpoint is one
                assert path.name.startswith(".tmp-") or checkpoints.check_whole(path) is None
        assert steps[1] >= steps[0]  # no checkpoint whose facts tell of a best that was not kept
        outcomes.add((process.exitcode, steps[0]))
        if process.exitcode == 0:
            break
        made.save(folders[0], 3, keep=1, best=folders[1])
        assert [made.names(folder) for folder in folders] == [["step-00000003"]] * 2
    else:
        pytest.fail("the save never came to its end")
    assert event > 15
    assert outcomes == {(-signal.SIGKILL, 1), (-signal.SIGKILL, step), (0, step)}


def test_full_disk_is_one_line_and_leaves_the_earlier_checkpoint(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            made.save(tmp_path, 2)
    assert "\n" not in str(caught.value)
    assert made.names(tmp_path) == ["step-00000001"]
    made.assert_holds(tmp_path / "step-00000001", 1)


def _without_room(made: Any, directory: Path, limit: int, answer: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # the system's own refusal, in the middle of a file
    try:
        made.save(directory, 2)
    except CheckpointError as error:
        answer.write_text(str(error))


@pytest.mark.parametrize("limit", [0, 100, 5_000, 20_000])
def test_a_file_that_the_system_cuts_short_is_one_line_and_leaves_the_earlier_checkpoint(
    made: Any, limit: int, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    made.save(directory, 1)
    assert (directory / "step-00000001" / "__0_0.distcp").stat().st_size > 20_000
    os.mkfifo(tmp_path / "answer")  # not a file, whose size would be limited too
    process = multiprocessing.get_context("fork").Process(
        target=_without_room, args=(made, directory, limit, tmp_path / "answer")
    )
    process.start()
    text = (tmp_path / "answer").read_text()
    process.join()
    assert text == f"{directory}/step-00000002: rank 0: File too large"
    assert made.names(directory) == ["step-00000001"]
    made.assert_holds(directory / "step-00000001", 1)


def test_a_best_that_cannot_be_kept_is_one_line_and_the_checkpoint_whole(made: Any, tmp_path: Path) -> None:
    (tmp_path / "best").touch()
    with pytest.raises(TrainingError, match=r"best: cannot be written: (File exists|Not a directory)$"):
        made.save(tmp_path / "checkpoints", 1, best=tmp_path / "best")
    assert made.names(tmp_path / "checkpoints") == ["step-00000001"]
    made.assert_holds(tmp_path / "checkpoints" / "step-00000001", 1)


def test_directory_that_cannot_be_made_is_one_line(made: Any, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match=r"step-00000001: (File exists|Not a directory)"):
        made.save(tmp_path / "run", 1)


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="/sys, where nobody may make a directory, is Linux's")
def test_directory_that_cannot_be_written_is_one_line(made: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^/sys/kernel/step-00000001: [A-Z][a-z -]+$"):
        made.save(Path("/sys/kernel"), 1)


def test_facts_that_are_not_plain_are_a_bug_and_leave_nothing(tmp_path: Path) -> None:
    for bad in (torch.zeros(1), float("nan")):
        with pytest.raises((TypeError, ValueError)):
            save(tmp_path / "run", 1, {}, {"bad": bad}, keep=1)
    assert not (tmp_path / "run").exists()
