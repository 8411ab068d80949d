"""The network of a checkpoint as settings: from a run folder, a checkpoint's facts or a file's header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from gpipe_cli.compose import load

MODEL = {"name": "amoebanet", "variant": "B", "layers": 5, "filters": 12, "stem": "auto", "split_cells": False}
CONFIG = {"command": "train", "model": MODEL, "dataset": {}, "optimizer": {}, "lr_schedule": {}, "image_size": 32}


def run_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return folder


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "facts.json").write_text(json.dumps({"facts": {"config": config}}))
    return folder


def exported(file: Path, config: dict[str, Any]) -> Path:
    save_file({"x": torch.zeros(1)}, file, metadata={"gpipe": json.dumps({"config": config})})
    return file


@pytest.mark.parametrize("write", [run_folder, checkpoint, exported])
def test_a_checkpoint_brings_its_network(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "it is (here)", CONFIG)
    model = load("transfer", [f"checkpoint={path}", "image_size=96", "model.dropout=0.3"]).model
    assert (model.variant, model.layers, model.filters, model.split_cells) == ("B", 5, 12, False)
    assert model.stem == "small"  # of the pictures that it was trained with, whatever the new ones are
    assert model.dropout == 0.3


def test_a_typed_network_is_not_replaced(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", CONFIG)
    assert load("transfer", [f"checkpoint={path}", "model=amoebanet"]).model.layers == 3
    assert load("transfer", [f"checkpoint={path}", "model.layers=4"]).model.layers == 4


def test_the_papers_network_brings_the_papers_recipe(tmp_path: Path) -> None:
    model = {**MODEL, "layers": 18, "filters": 512, "stem": "imagenet", "aux_head": True}
    path = run_folder(tmp_path / "run", {**CONFIG, "model": model})
    config = load("transfer", [f"checkpoint={path}", "dataset=cifar10"])
    assert (config.image_size, config.seeds, config.optimizer.name) == (480, 5, "rmsproptf")


def test_a_users_network_comes_with_its_arguments(tmp_path: Path) -> None:
    model = {"name": "module", "factory": "my.net:layers", "kwargs": {"width": 8, "kinds": ["a b", "c"], "deep": None}}
    found = load("transfer", [f"checkpoint={run_folder(tmp_path / 'run', {**CONFIG, 'model': model})}"]).model
    assert (found.name, found.factory, found.kwargs) == ("module", "my.net:layers", model["kwargs"])


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", {**CONFIG, "model": {"name": "transformer", "layers": 2, "seq_len": 8}})
    with pytest.raises(Exception, match="model=transformer: gpipe transfer is for pictures"):
        load("transfer", [f"checkpoint={path}", "dataset=digits"])


def test_what_cannot_be_read_is_left_to_those_who_load_it(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("no weights")
    for name in ("note.txt", "missing", "."):
        assert load("transfer", [f"checkpoint={tmp_path / name}"]).model.layers == 3
