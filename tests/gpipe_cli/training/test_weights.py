"""Finding a trained network and reading of it what is asked for, and nothing that is not gpipe's."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpipe_cli.errors import CheckpointError, ConfigError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.weights import find_newest, open_weights

FACTS = {
    "step": 7,
    "layers": ["a", "b"],
    "data": {"name": "digits", "num_train": 4, "num_eval": 2, "classes": ["cat", "dog"]},
    "config": {"model": {"name": "module"}, "dataset": {"name": "digits"}},
}
A, B = torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0])
TENSORS = {
    "model/a.weight": A,
    "model/a.tied": A,  # one tensor under two names, so the average has one of them
    "model/b.bias": B,
    "model/b.count": torch.tensor(3),
    "ema/a.weight": A / 2,
    "ema/b.bias": B / 2,
    "ema/b.count": torch.tensor(3),
    "optimizer/a.weight/momentum": A,
}


def checkpoint(run_dir: Path, step: int = 7, facts: dict[str, Any] = FACTS, **tensors: torch.Tensor) -> Path:
    return checkpoints.save(run_dir / "checkpoints", step, tensors or TENSORS, {**facts, "step": step}, keep=9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "run")


def test_the_facts_are_known_before_a_tensor_is_read(path: Path) -> None:
    stored = open_weights(path.parents[1])
    assert stored.path == path
    assert stored.classes == ("cat", "dog")
    assert stored.config["model"] == {"name": "module"}
    assert stored.facts["step"] == 7
    assert stored.shapes == {"a.weight": (2, 3), "a.tied": (2, 3), "b.bias": (2,), "b.count": ()}
    assert stored.has_average


def test_no_more_is_read_than_was_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = open_weights(path)
    asked: list[str] = []
    load = checkpoints.load
    monkeypatch.setattr(checkpoints, "load", lambda where, keys: asked.extend(keys) or load(where, keys))
    assert torch.equal(stored.read(["b.bias"])["b.bias"], B)
    assert asked == ["model/b.bias"]


def test_averages_are_found_under_every_name_of_a_tensor(path: Path) -> None:
    tensors = open_weights(path).read(["a.weight", "a.tied", "b.bias"], average=True)
    assert torch.equal(tensors["a.weight"], A / 2)
    assert torch.equal(tensors["a.tied"], A / 2)
    assert torch.equal(tensors["b.bias"], B / 2)


def test_what_is_not_stored_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks c\.weight and 1 more"):
        open_weights(path).read(["a.weight", "c.weight", "d.weight"])
    plain = open_weights(checkpoint(tmp_path / "plain", **{"model/a.weight": A}))
    assert not plain.has_average
    with pytest.raises(CheckpointError, match="holds no moving average"):
        plain.read(["a.weight"], average=True)


def test_auto_is_the_newest_whole_checkpoint_of_all_runs(tmp_path: Path) -> None:
    old, new, damaged, seed = (checkpoint(tmp_path / "runs" / name) for name in ("c", "a", "b", "t/seed-1"))
    for age, path in enumerate((damaged, new, seed, old)):
        os.utime(path, (1e9 - age, 1e9 - age))
    (damaged / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "runs" / "empty" / "checkpoints").mkdir(parents=True)
    assert open_weights("auto", results_dir=tmp_path).path == new
    assert find_newest(tmp_path, lambda config: config["model"]["name"] == "other") is None
    os.utime(new, (0, 0))
    assert find_newest(tmp_path) == seed


def test_auto_without_a_run_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint=auto: no run below .*runs has a whole checkpoint; gpipe train"):
        open_weights("auto", results_dir=tmp_path)


def exported(path: Path, **metadata: str) -> Path:
    save_file({"a.weight": A, "b.bias": B}, path, metadata=metadata or {"gpipe": json.dumps(FACTS)})
    return path


def test_an_exported_file_is_read_like_a_checkpoint_without_an_average(tmp_path: Path) -> None:
    stored = open_weights(exported(tmp_path / "model.safetensors"))
    assert stored.classes == ("cat", "dog")
    assert stored.shapes == {"a.weight": (2, 3), "b.bias": (2,)}
    assert not stored.has_average
    assert torch.equal(stored.read(["b.bias"])["b.bias"], B)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def test_a_foreign_pickle_is_refused_and_not_run(path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    file = tmp_path / "model.pt"
    torch.save({"a.weight": A, "evil": Evil(marker)}, file)
    metadata = path / ".metadata"
    metadata.write_bytes(pickle.dumps(Evil(marker)))
    manifest = json.loads((path / "facts.json").read_text())
    manifest["files"][".metadata"] = metadata.stat().st_size
    manifest["metadata_sha256"] = hashlib.sha256(metadata.read_bytes()).hexdigest()
    (path / "facts.json").write_text(json.dumps(manifest))
    for given, problem in ((file, "not a safetensors file"), (path, "which no checkpoint of gpipe holds; refused")):
        with pytest.raises(ConfigError, match=problem):
            open_weights(given)
    assert not marker.exists()


def truncated(tmp_path: Path) -> Path:
    path = exported(tmp_path / "half.safetensors")
    path.write_bytes(path.read_bytes()[:-4])
    return path


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: folder / "nix", "no such run directory, checkpoint or safetensors file"),
        (lambda folder: folder, "holds no whole checkpoint"),
        (truncated, "not a safetensors file"),
        (lambda folder: exported(folder / "x.safetensors", format="pt"), "says nothing of its network"),
        (lambda folder: exported(folder / "x.safetensors", gpipe="[1"), "says nothing of its network"),
        (lambda folder: exported(folder / "x.safetensors", gpipe="[1]"), "the settings of its run are not in it"),
        (lambda folder: checkpoint(folder, facts={"data": {}, "config": {"model": {}}}), "lack the model or the data"),
        (lambda folder: checkpoint(folder, facts={"config": {}}), "the settings of its run are not in it"),
    ],
)
def test_what_is_not_a_trained_network_of_gpipe_is_refused(make: Any, problem: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        open_weights(path)
    assert problem in str(caught.value)
    assert caught.value.key == "checkpoint"


def test_a_file_that_goes_away_is_one_line(tmp_path: Path) -> None:
    stored = open_weights(exported(tmp_path / "model.safetensors"))
    stored.path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        stored.read(["b.bias"])
