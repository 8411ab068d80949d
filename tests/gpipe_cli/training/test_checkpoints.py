"""Checkpoints: whole or not there, from any number of ranks to any other, and nothing foreign is ever run."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.errors import CheckpointError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.checkpoints import find_latest, keys, load, load_facts, resolve, save

FACTS = {"epoch": 2, "lr": 0.125, "classes": ["cat", "dög"], "config": {"model": None, "balance": [1, 2]}}


def tensors(step: int, layers: int = 4) -> dict[str, Tensor]:
    """Every key and value a function of the step, so that a mixture shows."""
    found: dict[str, Tensor] = {}
    for layer in range(layers):
        found[f"cell{layer}.weight"] = torch.full((3, 2, 2, 2), float(step)).to(memory_format=torch.channels_last)
        found[f"cell{layer}.num_batches_tracked"] = torch.tensor(step)
        found[f"optimizer/cell{layer}.weight/step:int"] = torch.tensor(step, dtype=torch.int64)
        found[f"ema/cell{layer}.weight"] = torch.full((2, 5), step / 3, dtype=torch.float64).t()
        found[f"cell{layer}.half"] = torch.full((2,), step, dtype=torch.bfloat16)
    return found


def assert_holds(path: Path, step: int) -> None:
    loaded, expected = load(path), tensors(step)
    assert loaded.keys() == expected.keys()
    for key, tensor in expected.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor), key
    assert load_facts(path)["step"] == step


def save_step(directory: Path, step: int, keep: int = 2) -> Path:
    return save(directory, step, tensors(step), {**FACTS, "step": step}, keep=keep)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_tensors_and_facts_come_back_as_they_were(tmp_path: Path) -> None:
    path = save_step(tmp_path, 123)
    assert path.name == "step-00000123"
    assert_holds(path, 123)
    assert load_facts(path) == {**FACTS, "step": 123}
    assert set(keys(path)) == set(tensors(0))
    some = ["cell1.weight", "ema/cell3.weight"]
    assert list(load(path, some)) == some


def test_last_ones_stay_and_the_newest_is_found(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "absent") is None
    assert find_latest(tmp_path) is None
    for step in (5, 10, 200):
        save_step(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000200"]
    assert find_latest(tmp_path) == tmp_path / "step-00000200"
    with pytest.raises(ValueError, match="keep"):
        save_step(tmp_path, 300, keep=0)


def test_a_step_saved_again_replaces_the_earlier_checkpoint(tmp_path: Path) -> None:
    save_step(tmp_path, 7)
    path = save(tmp_path, 7, {"new": torch.ones(1)}, {}, keep=2)
    assert names(tmp_path) == [path.name]
    assert list(load(path)) == ["new"]


def test_checkpoints_of_an_abandoned_continuation_do_not_outlive_the_new_one(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save_step(tmp_path, step, keep=3)
    save_step(tmp_path, 150, keep=2)
    assert names(tmp_path) == ["step-00000100", "step-00000150"]


def test_leftovers_are_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".tmp-step-00000009")
    assert find_latest(tmp_path) == tmp_path / "step-00000001"
    save_step(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def _save_own_layers(directory: Path, step: int, separate_group: bool) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo") if separate_group else None
    # Whole layers a rank, as stages have them; the last of three ranks has nothing of its own.
    own = {key: value for key, value in tensors(step).items() if int(key.split("cell")[1][0]) % min(size, 2) == rank}
    facts = {**FACTS, "step": step} if rank == 0 else {"not": "written"}
    return str(save(directory, step, own, facts, keep=2, process_group=group))


@pytest.mark.parametrize(("num_ranks", "separate_group"), [(2, False), (3, True)])
def test_ranks_with_different_keys_save_one_checkpoint_that_any_process_loads(
    num_ranks: int, separate_group: bool, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    for step in (3, 4):
        paths = run_ranks(num_ranks, _save_own_layers, tmp_path / "run", step, separate_group)
        assert set(paths) == {str(tmp_path / "run" / f"step-{step:08d}")}
        assert_holds(Path(paths[0]), step)
    assert len(list(Path(paths[0]).glob("*.distcp"))) == num_ranks


def _load_some(path: Path) -> list[str]:
    return list(load(path, [f"cell{dist.get_rank()}.weight"]))


def test_ranks_load_their_own_keys_of_a_checkpoint_of_one_process(
    tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    path = save_step(tmp_path / "run", 1)
    assert run_ranks(3, _load_some, path) == [[f"cell{rank}.weight"] for rank in range(3)]


def _fails_on_one_rank(directory: Path) -> str:
    if dist.get_rank() == 1:
        os.fsync = _no_space
    try:
        _save_own_layers(directory, 2, separate_group=False)
    except CheckpointError as error:
        return str(error)
    return "saved"


def _no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_when_one_rank_cannot_write_all_say_so_and_the_earlier_checkpoint_stays(
    tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    directory = tmp_path / "run"
    save_step(directory, 1)
    messages = run_ranks(2, _fails_on_one_rank, directory)
    assert all("No space left on device" in message and "\n" not in message for message in messages)
    assert names(directory) == ["step-00000001"]
    assert_holds(directory / "step-00000001", 1)


def _killed_at(event: int, directory: Path, step: int) -> None:
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

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    save_step(directory, step, keep=1)


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_killed_at_any_moment_a_whole_checkpoint_is_found_and_the_next_save_cleans_up(
    again: bool, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    step = 1 if again else 2
    outcomes = set()
    for event in range(1, 100):
        directory = tmp_path / str(event)
        save_step(directory, 1, keep=1)
        process = context.Process(target=_killed_at, args=(event, directory, step))
        process.start()
        process.join()
        latest = find_latest(directory)
        assert latest is not None
        found = load_facts(latest)["step"]
        assert found in (1, step)
        assert_holds(latest, found)
        for path in directory.iterdir():  # whatever looks like a checkpoint is one
            assert path.name.startswith(".tmp-") or checkpoints.check_whole(path) is None
        outcomes.add((process.exitcode, found))
        if process.exitcode == 0:
            break
        save_step(directory, 3, keep=1)
        assert names(directory) == ["step-00000003"]
    else:
        pytest.fail("the save never came to its end")
    assert event > 8
    assert outcomes == {(-signal.SIGKILL, 1), (-signal.SIGKILL, step), (0, step)}


def test_full_disk_is_one_line_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save_step(tmp_path, 2)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-00000001"]
    assert_holds(tmp_path / "step-00000001", 1)


def test_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match=r"step-00000001: (File exists|Not a directory)"):
        save_step(tmp_path / "run", 1)


def test_facts_that_are_not_plain_are_a_bug_and_leave_nothing(tmp_path: Path) -> None:
    for bad in (torch.zeros(1), float("nan")):
        with pytest.raises((TypeError, ValueError)):
            save(tmp_path / "run", 1, {}, {"bad": bad}, keep=1)
    assert not (tmp_path / "run").exists()


def _truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def _remove_data(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def _remove_facts(path: Path) -> None:
    (path / "facts.json").unlink()


def _halve_facts(path: Path) -> None:
    text = (path / "facts.json").read_text()
    (path / "facts.json").write_text(text[: len(text) // 2])


def _empty_manifest(path: Path) -> None:
    (path / "facts.json").write_text("{}")


def _remove_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def _take_data_of_another_step(path: Path) -> None:
    other = save_step(path.parent / "other", 1)
    assert (other / "__0_0.distcp").stat().st_size == (path / "__0_0.distcp").stat().st_size
    shutil.copy(other / "__0_0.distcp", path / "__0_0.distcp")


def _take_metadata_of_another_step(path: Path) -> None:
    shutil.copy(save_step(path.parent / "other", 1) / ".metadata", path / ".metadata")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_truncate, r"damaged: __0_0.distcp has \d+ bytes and should have \d+"),
        (_remove_data, "damaged: __0_0.distcp is missing"),
        (_remove_facts, "not a whole checkpoint: facts.json: No such file"),
        (_halve_facts, "damaged: facts.json is not a manifest"),
        (_empty_manifest, "damaged: facts.json is not a manifest"),
        (_remove_metadata, "damaged: .metadata is missing"),
        (_take_data_of_another_step, "damaged: its files come from different saves"),
        (_take_metadata_of_another_step, "damaged: .metadata (has|belongs to another)"),
    ],
)
def test_damaged_checkpoint_is_passed_over_and_refused_by_name(
    damage: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    save_step(tmp_path, 1)
    path = save_step(tmp_path, 2)
    damage(path)
    assert find_latest(tmp_path) == tmp_path / "step-00000001"
    for use in (load, resolve, keys):
        with pytest.raises(CheckpointError, match=text) as caught:
            use(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_damaged_checkpoint_does_not_count_among_those_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step, keep=3)
    _truncate(tmp_path / "step-00000003")
    save_step(tmp_path, 4, keep=2)
    assert {"step-00000002", "step-00000004"} <= set(names(tmp_path))
    assert "step-00000001" not in names(tmp_path)


def test_missing_key_is_named(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"lacks head\.bias and 1 more: it was written for another model"):
        load(path, ["cell0.weight", "head.weight", "head.bias"])


class _Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def _replace_metadata(path: Path, content: bytes) -> None:
    """Put another metadata file into a checkpoint, with a manifest that vouches for all its files."""
    (path / ".metadata").write_bytes(content)
    manifest = json.loads((path / "facts.json").read_text())
    manifest["files"] = {name: (path / name).stat().st_size for name in manifest["files"]}
    manifest["metadata_sha256"] = hashlib.sha256(content).hexdigest()
    (path / "facts.json").write_text(json.dumps(manifest))


def test_foreign_pickle_as_metadata_is_refused_and_not_run(tmp_path: Path) -> None:
    path = save_step(tmp_path / "run", 1)
    for content in (pickle.dumps(_Bomb(tmp_path / "ran")), pickle.dumps(os.system), b"\x80\x04K", b"text"):
        _replace_metadata(path, content)
        with pytest.raises(CheckpointError, match=r"refused|is not the metadata of a checkpoint") as caught:
            load(path)
        assert "\n" not in str(caught.value)
        assert find_latest(tmp_path / "run") is None
    assert not (tmp_path / "ran").exists()


def test_foreign_pickle_as_tensor_is_refused_and_not_run(tmp_path: Path) -> None:
    path = save_step(tmp_path / "run", 1)
    torch.save(_Bomb(tmp_path / "ran"), tmp_path / "bomb.pt")
    bomb, data = (tmp_path / "bomb.pt").read_bytes(), path / "__0_0.distcp"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "cell0.weight")
    place.offset, place.length = data.stat().st_size, len(bomb)
    data.write_bytes(data.read_bytes() + bomb)
    _replace_metadata(path, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="Weights only load failed") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_metadata_holds_no_local_path(tmp_path: Path) -> None:
    path = save_step(tmp_path, 1)
    assert str(tmp_path).encode() not in b"".join(file.read_bytes() for file in path.iterdir())


def test_a_run_its_checkpoints_or_one_of_them_may_be_named(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    first, second = save_step(directory, 1), save_step(directory, 2)
    assert resolve(tmp_path / "run") == second
    assert resolve(directory) == second
    assert resolve(first) == first


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "step-00000001").mkdir()
    for name, text in {
        "absent": "no such checkpoint",
        "model.pt": "is a file, not a checkpoint",
        "empty": "holds no whole checkpoint",
        "step-00000001": "not a whole checkpoint: facts.json",
    }.items():
        with pytest.raises(CheckpointError, match=text):
            resolve(tmp_path / name)
