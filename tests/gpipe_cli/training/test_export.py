"""The file for a plain nn.Sequential: every tensor, under its plain name, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from gpipe_cli.compose import load
from gpipe_cli.errors import ConfigError, TrainingError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.export import check_can_be_written, export_weights
from gpipe_cli.training.weights import StoredWeights, open_weights

CONFIG = load("train", ["model.layers=2", "model.filters=4", "dataset=folder", "dataset.path=/home/me", "image_size=8"])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), flat=nn.Flatten(), head=nn.Linear(144, 2))
    )
    model(torch.randn(4, 3, 8, 8))  # running statistics that are not the initial ones
    return model.eval()


@pytest.fixture
def stored(tmp_path: Path) -> StoredWeights:
    state = network().state_dict()
    tensors = {f"model/{name}": tensor for name, tensor in state.items()}
    tensors |= {f"ema/{name}": tensor / 2 if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    config = dataclasses.asdict(CONFIG) | {"run_dir": "/home/me/run", "results_dir": "/home/me/results"}
    facts = {"step": 3, "config": config, "data": {"name": "folder", "classes": ["cat", "dog"]}}
    return open_weights(checkpoints.save(tmp_path / "run", 3, tensors, json.loads(json.dumps(facts)), keep=1))


def test_the_plain_network_loads_the_file_strictly_and_is_the_same(stored: StoredWeights, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "model.safetensors"
    written = export_weights(stored, CONFIG, path, average=False)
    assert (written.path, written.num_tensors, written.num_bytes) == (path, 9, path.stat().st_size)
    model = network()
    nn.init.zeros_(model.head.weight)
    model.load_state_dict(load_file(path), strict=True)
    pictures = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(pictures), network()(pictures))


def test_the_average_is_written_where_it_is_asked_for(stored: StoredWeights, tmp_path: Path) -> None:
    path = export_weights(stored, CONFIG, tmp_path / "a.safetensors", average=True).path
    assert torch.equal(load_file(path)["head.weight"], network().head.weight / 2)
    again = open_weights(path)
    assert again.facts["weights"] == "average"
    assert not again.has_average
    assert again.facts["step"] == 3


def metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        found = dict(file.metadata())
    assert found.pop("format") == "pt"
    return {key: json.loads(text) for key, text in found.items()}


def test_the_file_says_what_the_network_is_and_names_no_folder_of_this_machine(
    stored: StoredWeights, tmp_path: Path
) -> None:
    path = export_weights(stored, CONFIG, tmp_path / "model.safetensors", average=False).path
    found = metadata(path)
    assert found["classes"] == ["cat", "dog"]
    assert found["model"]["name"] == "amoebanet"
    assert found["arguments"]["num_classes"] == 2
    assert found["arguments"]["stem"] == "small"
    assert found["input"] == {"image_size": 8, "mean": list(CONFIG.dataset.mean), "std": list(CONFIG.dataset.std)}
    assert b"/home/me" not in path.read_bytes()


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(
    stored: StoredWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    path = export_weights(stored, CONFIG, tmp_path / "model.safetensors", average=False).path
    before = path.read_bytes()

    def full(tensors: Any, file: Path, **_: Any) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(TrainingError, match=r"model\.safetensors: cannot be written: No space left on device"):
        export_weights(stored, CONFIG, path, average=True)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["model.safetensors"]


def test_a_place_where_no_file_can_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_can_be_written(tmp_path / "new" / "model.safetensors")
    with pytest.raises(ConfigError, match="is a folder"):
        check_can_be_written(tmp_path)
    with pytest.raises(ConfigError, match="file is a file; name another folder"):
        check_can_be_written(tmp_path / "file" / "model.safetensors")
