"""Which settings a resumed run has: its own, and what was typed on top."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.compose import load
from gpipe_cli.errors import ConfigError
from gpipe_cli.reporting.run_directory import write_config
from gpipe_cli.resume import changed_settings, refuse_another_run

OWN = ("model.layers=2", "dataset=synthetic", "dataset.size=40", "partitions=3", "balance=[1,2,3]", "epochs=5")


def make_run(folder: Path, *words: str) -> Path:
    """A run's folder as training leaves it, without the training."""
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    write_config(folder, dataclasses.asdict(load("train", words or OWN)))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(Path("results/runs/one"))


def test_the_folder_alone_brings_the_runs_own_settings(run_dir: Path) -> None:
    config = load("train", [f"resume={run_dir}"])
    assert config == dataclasses.replace(load("train", OWN), resume=str(run_dir), run_dir=str(run_dir))


def test_what_is_typed_wins_and_the_rest_stays(run_dir: Path) -> None:
    words = [f"resume={run_dir}", "epochs=9", "optimizer.lr=0.5", "dataset.size=80", "lr_schedule=step"]
    config = load("train", words)
    assert (config.epochs, config.optimizer.lr, config.dataset.size, config.model.layers) == (9, 0.5, 80, 2)
    assert (config.lr_schedule.name, config.lr_schedule.decay_epochs) == ("step", 30.0)
    assert config.balance == (1, 2, 3)


def test_naming_the_groups_again_resets_nothing(run_dir: Path) -> None:
    again = load("train", [f"resume={run_dir}", "model=amoebanet", "dataset=synthetic", "optimizer=adamw"])
    assert again == load("train", [f"resume={run_dir}"])


def test_another_number_of_partitions_leaves_the_old_cut_behind(run_dir: Path) -> None:
    assert load("train", [f"resume={run_dir}", "partitions=2"]).balance is None
    assert load("train", [f"resume={run_dir}", "partitions=2", "balance=[3,3]"]).balance == (3, 3)


def test_another_remat_leaves_the_budget_of_auto_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = make_run(Path("run"), *OWN, "remat=auto", "memory_gb=8")
    assert load("train", [f"resume={run_dir}"]).memory_gb == 8
    assert load("train", [f"resume={run_dir}", "memory_gb=9"]).memory_gb == 9
    assert load("train", [f"resume={run_dir}", "remat=full"]).memory_gb is None


def test_the_size_of_the_pictures_may_be_typed_either_way(run_dir: Path) -> None:
    for word in ("image_size=24", "dataset.image_size=24"):
        assert load("train", [f"resume={run_dir}", word]).image_size == 24


@pytest.mark.parametrize("part", ["", "/checkpoints", "/checkpoints/step-00000010"])
def test_a_run_may_be_named_by_its_checkpoints(run_dir: Path, part: str) -> None:
    config = load("train", [f"resume={run_dir}{part}"])
    assert config.resume == f"{run_dir}{part}"
    assert Path(str(config.run_dir)).resolve() == run_dir.resolve()


def test_auto_takes_the_newest_run_of_the_kind(run_dir: Path) -> None:
    newer = make_run(Path("results/runs/two"))
    make_run(Path("results/runs/three"), "dataset=synthetic", "model=module", "model.factory=a:b")
    os.utime(newer / "config.yaml", (2e9, 2e9))
    os.utime(Path("results/runs/three/config.yaml"), (3e9, 3e9))
    assert load("train", ["resume=auto", "dataset=synthetic"]).run_dir == str(newer)
    with pytest.raises(ConfigError, match="resume=auto: no run of model=amoebanet dataset=digits with a checkpoint"):
        load("train", ["resume=auto"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("seed=3",), "the run has seed=0, not 3; start a new run for that"),
        (("model.filters=8",), "the run has model.filters=16, not 8; start a new run for that"),
        (("model=amoebanet_b",), "the run has model.variant=D, not B; start a new run for that"),
        (("optimizer=sgd",), "the run has optimizer.name=adamw, not sgd; start a new run for that"),
    ],
)
def test_another_run_is_refused(run_dir: Path, words: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("train", [f"resume={run_dir}", *words])
    assert str(error.value) == f"resume={run_dir}: {line}"


def test_an_experiment_is_not_half_applied(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="experiment=imagenet_short: a resumed run keeps its settings"):
        load("train", [f"resume={run_dir}", "experiment=imagenet_short"])
    assert load("train", [f"resume={run_dir}", "recipe=null"]).model.layers == 2


@pytest.mark.parametrize(
    ("resume", "problem"),
    [
        ("nowhere", "there is no such run folder or checkpoint"),
        ("results", "holds no run: name a run folder"),
        ("broken", "its config.yaml cannot be read"),
    ],
)
def test_what_is_no_run_is_refused(run_dir: Path, resume: str, problem: str) -> None:
    Path("broken").mkdir()
    Path("broken", "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=problem):
        load("train", [f"resume={resume}"])


def settings(**changes: Any) -> dict[str, Any]:
    optimizer = {"name": "sgd", "momentum": 0.9, "options": {}, "lr": 0.1, **changes.pop("optimizer", {})}
    fixed = {"command": "train", "model": {"layers": 2}, "seed": 0, "batch_size": 8}
    return {**fixed, "optimizer": optimizer, "ema_decay": 0.0, **changes}


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({"optimizer": {"momentum": 0.0}}, "the run has optimizer.momentum=0.9, not 0"),
        ({"optimizer": {"options": {"amsgrad": True}}}, "the run has optimizer.options.amsgrad=null, not true"),
        ({"ema_decay": 0.9}, "the run has ema_decay=0, not 0.9"),
    ],
)
def test_state_that_the_checkpoint_lacks_cannot_be_asked_for(now: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        refuse_another_run("run", settings(), settings(**now))
    assert str(error.value).startswith(f"resume=run: {line}")


@pytest.mark.parametrize(
    "now", [{"optimizer": {"momentum": 0.8, "lr": 1.0}}, {"optimizer": {"options": {"dampening": 0.1}}}, {"epochs": 9}]
)
def test_other_numbers_for_the_same_state_are_fine(now: dict[str, Any]) -> None:
    refuse_another_run("run", settings(ema_decay=0.5), settings(**now))


def test_changes_are_listed_as_they_are_typed() -> None:
    stored = {"epochs": 1, "workers": 0, "dataset": {"mean": [0.5, 0.5], "size": None}, "clip_grad_norm": None}
    now = {"epochs": 2, "workers": 2, "dataset": {"mean": (0.5, 0.5), "size": 8}, "clip_grad_norm": 1.0}
    assert changed_settings(stored, now) == ["workers: 0 -> 2", "dataset.size: null -> 8", "clip_grad_norm: null -> 1"]
