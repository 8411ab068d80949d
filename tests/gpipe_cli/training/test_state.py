"""What a checkpoint of a run holds, and putting it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.errors import CheckpointError, TrainingError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.picture_task import PictureTask
from gpipe_cli.training.session import Session
from gpipe_cli.training.state import restore, save_checkpoint

MakeSession = Callable[..., Session]


def train_a_step(session: Session) -> Session:
    generator = torch.Generator().manual_seed(session.pipe.step)
    images = torch.randn(16, 3, 8, 8, generator=generator)
    session.optimizer.zero_grad()
    session.pipe.forward_backward(images, torch.arange(16) % 10)
    session.optimizer.step()
    if session.average is not None:
        session.average.update(session.pipe.step)
    return session


def held(session: Session) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in session.pipe.named_parameters()}
    average = session.average.state_dict() if session.average is not None else {}
    tensors = {**session.pipe.state_dict(), **checkpoints.optimizer_tensors(session.optimizer, names), **average}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_a_fresh_session_goes_on_as_the_saved_one(make_session: MakeSession, gpipe: Any, tmp_path: Path) -> None:
    first = train_a_step(make_session("ema_decay=0.9"))
    path = save_checkpoint(first, tmp_path, 1, 0.25)
    second = make_session("ema_decay=0.9", "partitions=3", "ranks=1")
    restore(second, path)
    assert second.pipe.step == 1
    assert gpipe.same_tensors(held(second), held(first))
    assert gpipe.same_tensors(held(train_a_step(second)), held(train_a_step(first)))
    facts = checkpoints.load_facts(path)
    assert (facts["step"], facts["best_score"], facts["steps_per_epoch"]) == (1, 0.25, 2)


def test_weights_load_strictly_into_the_plain_network(make_session: MakeSession, tmp_path: Path) -> None:
    from gpipe_cli.training.networks import build_network

    session = train_a_step(make_session("partitions=2", "ranks=1"))
    path = save_checkpoint(session, tmp_path, 1, None)
    config = session.config
    plain = torch.nn.Sequential()
    for name, factory in build_network(config.model, 10, config.image_size, 99):
        plain.add_module(name, factory())
    tensors = checkpoints.load(path)
    weights = {key.removeprefix("model/"): value for key, value in tensors.items() if key.startswith("model/")}
    plain.load_state_dict(weights, strict=True)
    images = torch.randn(5, 3, 8, 8)
    outputs = session.pipe.evaluate(images)
    assert isinstance(outputs, torch.Tensor)
    assert torch.allclose(plain.eval()(images), outputs, atol=1e-5)


def test_weights_that_are_not_finite_are_not_written(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session()
    good = save_checkpoint(session, tmp_path, 1, None)
    with torch.no_grad():
        next(session.pipe.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"^stem\.conv.* is not finite after step 2: no checkpoint is written"):
        save_checkpoint(session, tmp_path, 2, None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [good.name]


def test_another_network_is_refused_with_both_shapes(make_session: MakeSession, tmp_path: Path) -> None:
    path = save_checkpoint(make_session(), tmp_path, 1, None)
    with pytest.raises(CheckpointError, match=r"has shape \(4, .*\), this network's has \(8, .*\): resume needs the"):
        restore(make_session("model.filters=8"), path)
    with pytest.raises(CheckpointError, match="lacks model/aux_head"):
        restore(make_session("model.aux_head=true"), path)


def test_other_classes_are_refused_by_their_names(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session()
    path = save_checkpoint(session, tmp_path, 1, None)
    renamed = dataclasses.replace(session.info, classes=("cat", *session.info.classes[1:]))
    with pytest.raises(CheckpointError, match=r"was trained on 10 classes \(class0, .*the data has 10 classes \(cat, "):
        restore(dataclasses.replace(session, task=PictureTask(session.config, renamed)), path)


def test_the_best_is_kept_once_and_survives_the_checkpoints(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session("keep_checkpoints=1")
    save_checkpoint(session, tmp_path, 1, None, is_best=True)
    save_checkpoint(session, tmp_path, 2, None)
    best = tmp_path / "best" / "step-00000001"
    checkpoints.check_whole(best)
    assert checkpoints.resolve(best) == best
    assert not (tmp_path / "checkpoints" / best.name).exists()
    (tmp_path / "best" / ".tmp-step-00000009").mkdir()  # left by a run that was killed
    (tmp_path / "best" / "notes.txt").touch()
    for _ in range(2):
        save_checkpoint(session, tmp_path, 3, None, is_best=True)
        assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["notes.txt", "step-00000003"]
    data = "step-00000003/__0_0.distcp"
    assert (tmp_path / "best" / data).samefile(tmp_path / "checkpoints" / data)
