"""Checkpoints: found, named, told from damaged ones, and read at any number of ranks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpipe_cli.errors import CheckpointError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.checkpoints import find_latest, keys, load, load_facts, resolve


def test_tensors_and_facts_come_back_as_they_were(made: Any, tmp_path: Path) -> None:
    path = made.save(tmp_path, 123)
    assert path.name == "step-00000123"
    made.assert_holds(path, 123)
    assert load_facts(path) == {**made.facts, "step": 123}
    assert set(keys(path)) == set(made.tensors(0))
    some = ["cell1.weight", "ema/cell3.weight"]
    assert list(load(path, some)) == some


def _load_some(path: Path) -> list[str]:
    return list(load(path, [f"cell{dist.get_rank()}.weight"]))


def test_ranks_load_their_own_keys_of_a_checkpoint_of_one_process(
    made: Any, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    path = made.save(tmp_path / "run", 1)
    assert run_ranks(3, _load_some, path) == [[f"cell{rank}.weight"] for rank in range(3)]


def _truncate(_: Any, path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def _remove_data(_: Any, path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def _remove_facts(_: Any, path: Path) -> None:
    (path / "facts.json").unlink()


def _halve_facts(_: Any, path: Path) -> None:
    text = (path / "facts.json").read_text()
    (path / "facts.json").write_text(text[: len(text) // 2])


def _empty_manifest(_: Any, path: Path) -> None:
    (path / "facts.json").write_text("{}")


def _remove_metadata(_: Any, path: Path) -> None:
    (path / ".metadata").unlink()


def _take_data_of_another_step(made: Any, path: Path) -> None:
    other = made.save(path.parent / "other", 1)
    assert (other / "__0_0.distcp").stat().st_size == (path / "__0_0.distcp").stat().st_size
    shutil.copy(other / "__0_0.distcp", path / "__0_0.distcp")


def _take_metadata_of_another_step(made: Any, path: Path) -> None:
    shutil.copy(made.save(path.parent / "other", 1) / ".metadata", path / ".metadata")


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
    made: Any, damage: Callable[[Any, Path], None], text: str, tmp_path: Path
) -> None:
    made.save(tmp_path, 1)
    path = made.save(tmp_path, 2)
    damage(made, path)
    assert find_latest(tmp_path) == tmp_path / "step-00000001"
    (line,) = checkpoints.passed_over(tmp_path / "step-00000001")
    assert re.match(f"{path}: passed over, {text}", line)
    for use in (load, resolve, keys):
        with pytest.raises(CheckpointError, match=text) as caught:
            use(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def _save_half(made: Any, directory: Path, step: int) -> str:
    rank = dist.get_rank()
    own = {key: value for key, value in made.tensors(step).items() if int(key.split("cell")[1][0]) % 2 == rank}
    return str(checkpoints.save(directory, step, own, {"step": step}, keep=9))


def test_a_file_that_another_rank_wrote_in_another_save_is_noticed(
    made: Any, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    """Also of the same step, and of the same size: two runs that started from one checkpoint."""
    first, second = (Path(run_ranks(2, _save_half, made, tmp_path / name, 5)[0]) for name in ("one", "other"))
    made.assert_holds(first, 5)
    assert (first / "__1_0.distcp").stat().st_size == (second / "__1_0.distcp").stat().st_size
    shutil.copy(second / "__1_0.distcp", first / "__1_0.distcp")
    with pytest.raises(CheckpointError, match="damaged: its files come from different saves; use an earlier"):
        load(first)


def test_a_changed_byte_in_a_tensor_is_noticed_when_it_is_read(made: Any, tmp_path: Path) -> None:
    path = made.save(tmp_path, 3)
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    place = content.index(torch.full((2,), 3.0).numpy().tobytes())  # the first two numbers of a weight
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    problem = "damaged: __0_0.distcp has changed since it was written; use an earlier checkpoint"
    assert str(caught.value) == f"{path}: {problem}"


def test_missing_key_is_named(made: Any, tmp_path: Path) -> None:
    path = made.save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"lacks head\.bias and 1 more: it was written for another model"):
        load(path, ["cell0.weight", "head.weight", "head.bias"])


def test_a_run_its_checkpoints_or_one_of_them_may_be_named(made: Any, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    first, second = made.save(directory, 1), made.save(directory, 2)
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
