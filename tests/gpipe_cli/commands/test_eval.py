"""`gpipe eval`: the numbers of the run itself at any cut, exports, and what is refused.

One thread: an evaluation without a cut runs in this process, from which later tests fork their ranks.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from gpipe_cli.models.amoebanet.network import amoebanet
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file

from gpipe_cli.config import ModelConfig
from gpipe_cli.data.synthetic import Synthetic
from gpipe_cli.training.networks import network_arguments

NUM_EVAL = 11  # in batches of 4: the last one is partial
SETTINGS = ("dataset.size=55", "eval_batch_size=4", "ema_decay=0.5", "optimizer.lr=0.01", "partitions=2", "epochs=2")


@pytest.fixture(scope="module")
def trained(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    ended = gpipe.train(tmp_path_factory.mktemp("trained"), *gpipe.tiny, *SETTINGS)
    assert ended.exit_code == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def last(trained: Any) -> dict[str, float]:
    """The run's own last evaluation."""
    row = trained.rows[-1]
    return {"top1": row["top1"], "top5": row["top5"], "loss": row["eval_loss"], "num_samples": row["num_eval"]}


def evaluate(gpipe: Any, trained: Any, folder: Path, *words: str) -> tuple[dict[str, Any], Any]:
    """The summary of an evaluation typed in `folder`, and the command that has ended."""
    ended = gpipe.run("eval", folder, "threads=1", f"checkpoint={trained.run_dir}", "progress=none", *words)
    assert ended.exit_code == 0, ended.stderr
    return ended.summary, ended


def per_class(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "per_class.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "words",
    [(), ("partitions=1",), ("partitions=3", "balance=[1,4,1]", "ranks=2")],
    ids=["as the run", "uncut", "cut otherwise"],
)
def test_the_numbers_are_those_of_the_runs_own_evaluation(
    gpipe: Any, trained: Any, last: dict[str, float], tmp_path: Path, words: tuple[str, ...]
) -> None:
    summary, ended = evaluate(gpipe, trained, tmp_path, *words)
    assert {key: summary[key] for key in last} == last
    assert summary["num_samples"] == NUM_EVAL
    assert (summary["command"], summary["split"], summary["weights"]) == ("eval", "eval", "average")
    assert summary["checkpoint"] == str(trained.checkpoint)
    assert summary["num_parameters"] == trained.summary["num_parameters"]
    assert f"top-1      {100 * last['top1']:.2f} %" in ended.stdout
    assert "moving average, trained for 6 steps" in ended.stdout


def test_every_class_is_counted_exactly(gpipe: Any, trained: Any, last: dict[str, float], tmp_path: Path) -> None:
    _, ended = evaluate(gpipe, trained, tmp_path, "partitions=1")
    rows = per_class(ended.run_dir)
    samples = Synthetic("eval", 0, num_samples=NUM_EVAL, num_classes=10, image_size=8)
    labels = [samples[index][1] for index in range(NUM_EVAL)]
    assert [int(row["num_samples"]) for row in rows] == [labels.count(label) for label in range(10)]
    assert sum(int(row["num_right"]) for row in rows) == round(last["top1"] * NUM_EVAL)
    assert (ended.run_dir / "confusion.png").read_bytes().startswith(b"\x89PNG")
    config = OmegaConf.to_container(OmegaConf.load(ended.run_dir / "config.yaml"))
    assert isinstance(config, dict)
    assert (config["command"], config["partitions"], config["run"]["dataset"]["size"]) == ("eval", 1, 55)
    assert sorted(path.name for path in ended.run_dir.iterdir()) == [
        "config.yaml", "confusion.png", "per_class.csv", "summary.json",
    ]  # fmt: skip


def test_the_training_split_is_counted_whole_and_not_augmented(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    (one, _), (two, ended) = (
        evaluate(gpipe, trained, tmp_path / name, "split=train", "partitions=1", f"batch_size={name}")
        for name in ("16", "3")
    )
    assert one["num_samples"] == two["num_samples"] == 55
    assert one["top1"] == two["top1"]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert "55 samples of the training split, not augmented" in ended.stdout


def test_raw_weights_are_others_than_the_average(
    gpipe: Any, trained: Any, last: dict[str, float], tmp_path: Path
) -> None:
    summary, ended = evaluate(gpipe, trained, tmp_path, "weights=raw", "partitions=1")
    assert summary["weights"] == "raw"
    assert summary["loss"] != last["loss"]
    assert "not averaged" in ended.stdout


def plain(trained: Any) -> torch.nn.Sequential:
    config = OmegaConf.to_container(OmegaConf.load(trained.run_dir / "config.yaml"))
    assert isinstance(config, dict)
    layers = amoebanet(**network_arguments(ModelConfig(**config["model"]), 10, 8))
    return torch.nn.Sequential(OrderedDict((name, make()) for name, make in layers)).eval()


def test_an_export_needs_no_data_and_is_the_network_that_was_evaluated(
    gpipe: Any, trained: Any, last: dict[str, float], tmp_path: Path
) -> None:
    words = (f"checkpoint={trained.run_dir}", "export=model.safetensors", "dataset.size=7")
    ended = gpipe.run("eval", tmp_path, "threads=1", *words)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.startswith("model.safetensors: ")
    assert "moving average of the weights after 6 steps" in ended.stdout
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.safetensors"]
    model = plain(trained)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    stored = {key: value for key, value in trained.tensors.items() if key.startswith("ema/")}
    assert gpipe.same_tensors({f"ema/{key}": value for key, value in model.state_dict().items()}, stored)

    again = gpipe.run("eval", tmp_path, "threads=1", "checkpoint=model.safetensors", "partitions=2", "progress=none")
    assert again.exit_code == 0, again.stderr
    assert {key: again.summary[key] for key in last} == last
    assert again.summary["weights"] == "average"


def test_the_readmes_lines_use_an_export_without_gpipe(gpipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    blocks = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8").split("```")
    network = next(block for block in blocks if block.startswith("python\n# mynet.py"))
    lines = [block for block in blocks if block.startswith("python\n") and "load_file" in block]
    (tmp_path / "mynet.py").write_text(network.removeprefix("python\n"))
    words = ("model.factory=mynet:layers", "model.kwargs.width=32", "dataset.num_classes=10", "partitions=2")
    trained = gpipe.train(tmp_path, *gpipe.tiny_module, *words)
    assert trained.exit_code == 0, trained.stderr
    assert gpipe.run("eval", tmp_path, "threads=1", "export=model.safetensors").exit_code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}
    exec(lines[0].removeprefix("python\n"), names)
    state = names["model"].state_dict()
    assert "gpipe_cli" not in lines[0]
    assert not names["model"].training
    assert gpipe.same_tensors({f"model/{key}": value for key, value in state.items()}, {
        key: value for key, value in trained.tensors.items() if key.startswith("model/")
    })  # fmt: skip


def test_auto_is_the_newest_run_of_the_results(
    gpipe: Any, trained: Any, last: dict[str, float], tmp_path: Path
) -> None:
    shutil.copytree(trained.folder / "results", tmp_path / "results")
    ended = gpipe.run("eval", tmp_path, "threads=1", "partitions=1", "run_dir=here", "progress=none")
    assert ended.exit_code == 0, ended.stderr
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())
    assert {key: summary[key] for key in last} == last
    assert summary["checkpoint"].startswith("results/runs/")


def test_labels_are_those_of_the_training_whatever_folders_there_are(gpipe: Any, tmp_path: Path) -> None:
    colors = {"a": (255, 0, 0), "b": (0, 255, 0), "c": (0, 0, 255), "d": (9, 9, 9)}
    for place in (*("p/train/" + name for name in "abc"), *("p/val/" + name for name in "bc"), "q/val/c", "r/val/d"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(6 if "train" in place else 2):
            Image.new("RGB", (8, 8), colors[place[-1]]).save(tmp_path / place / f"{number}.png")
    words = ("dataset=folder", "dataset.path=p", "dataset.augment=none", "image_size=8", "batch_size=9", "epochs=30")
    words = (*words, "model=module", gpipe.network(tmp_path), "threads=1", "optimizer.lr=0.03", "log_every=10")
    trained = gpipe.train(tmp_path, *words, "device=cpu")
    assert trained.exit_code == 0, trained.stderr
    checkpoint = f"checkpoint={trained.run_dir}"

    def evaluated(*words: str) -> Any:
        return gpipe.run("eval", tmp_path, "threads=1", checkpoint, "progress=none", *words)

    ended = evaluated("run_dir=one")
    assert ended.exit_code == 0, ended.stderr
    counts = [(row["class"], row["num_samples"], row["num_right"]) for row in per_class(tmp_path / "one")]
    assert counts == [("a", "0", "0"), ("b", "2", "2"), ("c", "2", "2")]
    assert evaluated("run_dir=two", "dataset.path=q").exit_code == 0  # no training split, two classes missing
    assert [row["num_right"] for row in per_class(tmp_path / "two")] == ["0", "0", "2"]
    ended = evaluated("run_dir=three", "dataset.path=r")
    assert ended.exit_code == 2
    assert ended.error.startswith("dataset.path=r/val: d is not among the classes that the network knows")
    assert not (tmp_path / "three").exists()


def test_a_network_that_has_been_changed_since_is_one_line(gpipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    setting = gpipe.network(tmp_path)
    trained = gpipe.train(tmp_path, *gpipe.tiny_module, setting, "epochs=0")
    assert trained.exit_code == 0, trained.stderr
    module = sys.modules[setting.removeprefix("model.factory=").partition(":")[0]]
    layers = module.layers
    for changed, problem in (
        (lambda num_classes: layers(num_classes, width=5), "conv.weight has shape (4, 3, 3, 3), the network's has (5,"),
        (
            lambda num_classes: layers(num_classes)[1:],
            "has 5 layers (conv, relu, pool, …), the network now has 4 (relu",
        ),
    ):
        monkeypatch.setattr(module, "layers", changed)
        ended = gpipe.run(
            "eval", tmp_path, "threads=1", f"checkpoint={trained.run_dir}", "progress=none", "run_dir=out"
        )
        assert ended.exit_code == 1
        assert problem in ended.error
        assert ended.error.endswith("it has been changed since")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("checkpoint=nix",), "checkpoint=nix: no such run directory, checkpoint or safetensors file"),
        (("checkpoint=auto",), "checkpoint=auto: no run below results/runs has a whole checkpoint; gpipe train makes"),
        (("checkpoint=auto", "prompt=Once"), "checkpoint=auto: no language model below results/runs has a whole check"),
        (("checkpoint=some.pt",), "checkpoint=some.pt: not a safetensors file"),
        (("partitions=7",), "partitions=7: the network has 6 layers; use at most that"),
        (
            ("prompt=Once upon a time, there",),
            "prompt=Once upon a time, there: model=amoebanet was trained on pictures",
        ),
        (("export=folder.safetensors",), "export=folder.safetensors: is a folder; name a file"),
        (("run_dir=some.pt",), "run_dir=some.pt: is a file; name a folder"),
        (("dataset.path=photos",), "dataset.path=photos: dataset=synthetic does not use it; leave it out"),
        (("dataset.num_classes=3",), "dataset.num_classes=3: the checkpoint says it; leave it out, or train anew"),
    ],
)
def test_what_cannot_work_is_one_line_and_writes_nothing(
    gpipe: Any, trained: Any, tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    folder = tmp_path / "typed"
    (folder / "folder.safetensors").mkdir(parents=True)
    torch.save({}, folder / "some.pt")
    before = sorted(folder.rglob("*"))
    ended = gpipe.run("eval", folder, "threads=1", f"checkpoint={trained.run_dir}", *words)
    assert ended.exit_code == 2
    assert ended.error.startswith(line)
    assert sorted(folder.rglob("*")) == before


def test_the_folder_of_another_run_is_left_alone(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    before = (trained.run_dir / "summary.json").read_bytes()
    ended = gpipe.run("eval", tmp_path, "threads=1", f"checkpoint={trained.run_dir}", f"run_dir={trained.run_dir}")
    assert ended.exit_code == 2
    assert "already holds a run; choose another folder" in ended.error
    assert (trained.run_dir / "summary.json").read_bytes() == before


def test_weights_that_the_run_did_not_keep_are_refused(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    exported = gpipe.run(
        "eval", tmp_path, "threads=1", f"checkpoint={trained.run_dir}", "weights=raw", "export=raw.safetensors"
    )
    assert exported.exit_code == 0, exported.stderr
    ended = gpipe.run("eval", tmp_path, "threads=1", "checkpoint=raw.safetensors", "weights=average")
    assert ended.exit_code == 2
    assert ended.error.startswith("weights=average: raw.safetensors holds the weights as trained; leave it out")
    without = gpipe.train(tmp_path, *gpipe.tiny, "epochs=0")
    ended = gpipe.run("eval", tmp_path, "threads=1", f"checkpoint={without.run_dir}", "weights=average")
    assert (ended.exit_code, ended.error) == (
        2,
        "weights=average: the run kept no moving average (ema_decay=0); use weights=raw",
    )
