"""`gpipe transfer`: what is loaded, what may move, several seeds, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.training import checkpoints

HEAD = "classifier."
SETTINGS = (
    "dataset.num_classes=3", "dataset.size=32", "dataset=synthetic", "image_size=8", "batch_size=16", "threads=1",
    "device=cpu", "log_every=1", "progress=none",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """AmoebaNet-D (2, 4) after two steps on 7 classes."""
    ended = gpipe.train(tmp_path_factory.mktemp("trained"), *gpipe.tiny, "dataset.num_classes=7", "optimizer.lr=0.01")
    assert ended.exit_code == 0, ended.stderr
    return ended


def transfer(gpipe: Any, folder: Path, *words: str) -> Any:
    ended = gpipe.run("transfer", folder, *SETTINGS, *words)
    assert ended.exit_code == 0, ended.stderr
    return ended


def network(tensors: dict[str, torch.Tensor], of_head: bool, kind: str = "model/") -> dict[str, torch.Tensor]:
    names = [name for name in tensors if name.startswith(kind) and name.startswith(f"{kind}{HEAD}") == of_head]
    return {name.removeprefix(kind): tensors[name] for name in names}


@pytest.mark.parametrize("partitions", [1, 2])
def test_the_body_is_the_checkpoints_bit_for_bit_and_the_head_is_new(
    gpipe: Any, trained: Any, tmp_path: Path, partitions: int
) -> None:
    words = (f"checkpoint={trained.run_dir}", f"partitions={partitions}", "epochs=0")
    ended = transfer(gpipe, tmp_path, *words, "progress=plain")
    body = network(ended.tensors, of_head=False)
    assert gpipe.same_tensors(body, network(trained.tensors, of_head=False))
    assert ended.tensors["model/classifier.linear.weight"].shape == (3, 64)
    (line,) = [line for line in ended.stderr.splitlines() if "tensors as they are" in line]
    assert line == (
        f"weights of {trained.checkpoint}: {len(body)} tensors as they are; new for 3 classes: "
        "classifier.linear.weight (7, 64) -> (3, 64), classifier.linear.bias (7) -> (3)"
    )


@pytest.mark.parametrize("words", [("partitions=1",), ("partitions=3", "balance=[1,4,1]", "ranks=2")])
def test_a_frozen_body_does_not_move_and_has_no_optimizer_state(
    gpipe: Any, trained: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = transfer(gpipe, tmp_path, f"checkpoint={trained.checkpoint}", "freeze=true", "epochs=2", *words)
    body = network(ended.tensors, of_head=False)
    assert gpipe.same_tensors(body, network(trained.tensors, of_head=False))
    assert any(name.endswith("running_var") for name in body)
    assert {name.split("/")[1] for name in ended.tensors if name.startswith("optimizer/")} == {
        "classifier.linear.weight", "classifier.linear.bias",
    }  # fmt: skip
    assert ended.losses[-1] < ended.losses[0]


def test_training_does_not_depend_on_the_cut(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    words = (f"checkpoint={trained.run_dir}", "layer_decay=0.5", "epochs=3", "head_warmup_epochs=1.5")
    whole = transfer(gpipe, tmp_path / "whole", *words, "keep_checkpoints=3")
    cut = transfer(gpipe, tmp_path / "cut", *words, "partitions=2", "balance=[1,5]", "steps=2")
    # Half way, with the body still frozen: only the head has moved.
    assert gpipe.same_tensors(network(cut.tensors, of_head=False), network(trained.tensors, of_head=False))
    cut = gpipe.run("transfer", tmp_path / "cut", f"resume={cut.run_dir}", "steps=null", "partitions=3", "balance=null")
    assert cut.exit_code == 0, cut.stderr
    assert cut.steps == whole.steps
    assert gpipe.same_tensors(cut.tensors, whole.tensors)
    assert not gpipe.same_tensors(network(cut.tensors, of_head=False), network(trained.tensors, of_head=False))


def test_the_averaged_weights_are_begun_with_and_go_on_as_the_average(gpipe: Any, tmp_path: Path) -> None:
    before = gpipe.train(tmp_path / "a", *gpipe.tiny, "ema_decay=0.5", "optimizer.lr=0.01")
    ended = transfer(gpipe, tmp_path / "b", f"checkpoint={before.run_dir}", "epochs=0", "ema_decay=0.5")
    average = network(before.tensors, of_head=False, kind="ema/")
    assert not gpipe.same_tensors(average, network(before.tensors, of_head=False))
    assert gpipe.same_tensors(network(ended.tensors, of_head=False), average)
    assert gpipe.same_tensors(network(ended.tensors, of_head=False, kind="ema/"), average)
    for part in (True, False):
        assert gpipe.same_tensors(network(ended.tensors, part, "ema/"), network(ended.tensors, part))


def test_an_exported_file_is_loaded_like_its_checkpoint(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    exported = gpipe.run("eval", tmp_path, f"checkpoint={trained.run_dir}", "export=it.safetensors", "progress=none")
    assert exported.exit_code == 0, exported.stderr
    ended = transfer(gpipe, tmp_path, "checkpoint=it.safetensors", "epochs=0", "run_dir=new")
    newest = checkpoints.find_latest(ended.folder / "new" / "checkpoints")
    assert newest is not None
    body = network(checkpoints.load(newest), of_head=False)
    assert gpipe.same_tensors(body, network(trained.tensors, of_head=False))


def test_auto_takes_the_newest_run_of_training_with_the_network(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    shutil.copytree(trained.folder / "results", tmp_path / "results")
    (run,) = [path.name for path in (tmp_path / "results" / "runs").iterdir()]
    words = ("model.layers=2", "model.filters=4", "model.split_cells=false", "epochs=0")
    for number in (1, 2):  # the second time there is a newer one, which has been fine-tuned
        transfer(gpipe, tmp_path, *words, f"run_dir=results/runs/fine-tuned-{number}")
        summary = json.loads((tmp_path / f"results/runs/fine-tuned-{number}/summary.json").read_text())
        assert summary["init"] == f"{run}/step-00000002"


def test_from_scratch_is_training_by_the_same_settings(gpipe: Any, tmp_path: Path) -> None:
    words = ("model.layers=2", "model.filters=4", "model.split_cells=false", "epochs=1")
    scratch = transfer(gpipe, tmp_path / "a", "checkpoint=scratch", *words)
    plain = gpipe.train(tmp_path / "b", *SETTINGS, *words)
    assert scratch.steps == plain.steps
    assert gpipe.same_tensors(scratch.tensors, plain.tensors)
    assert (scratch.summary["init"], plain.summary["init"]) == ("scratch", None)


def row(folder: Path) -> dict[str, str]:
    with (folder / "results" / "accuracy.csv").open(encoding="utf-8", newline="") as file:
        (found,) = [row for row in csv.DictReader(file) if row["kind"] == "measured"]
    return found


def of_seeds(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads((run_dir / f"seed-{seed}" / "summary.json").read_text()) for seed in (5, 6)]


def test_several_seeds_give_a_row_with_mean_and_spread_and_can_be_gone_on_with(
    gpipe: Any, trained: Any, tmp_path: Path
) -> None:
    words = (f"checkpoint={trained.run_dir}", "epochs=1", "optimizer.lr=0.01", "seed=5", "seeds=2", "run_dir=many")
    ended = transfer(gpipe, tmp_path, *words)
    many = tmp_path / "many"
    results, whole = of_seeds(many), json.loads((many / "summary.json").read_text())
    assert [result["seed"] for result in results] == [5, 6]
    assert results[0]["loss"] != results[1]["loss"]
    assert whole["loss"] == statistics.fmean(result["loss"] for result in results)
    assert whole["top1_std"] == statistics.stdev(result["top1"] for result in results)
    found = row(tmp_path)
    assert (found["num_seeds"], found["seed"], found["dataset"]) == ("2", "5", "synthetic")
    assert (float(found["top1"]), float(found["top1_std"])) == (whole["top1"], whole["top1_std"])
    assert f"{100 * whole['top1']:.2f} %, mean of 2 seeds; standard deviation" in ended.stdout

    # Stopped before the second seed had saved anything: it is run again, the first has nothing to do.
    shutil.rmtree(many / "seed-6" / "checkpoints")
    (many / "summary.json").unlink()
    again = gpipe.run("transfer", tmp_path, "resume=many")
    assert again.exit_code == 0, again.stderr
    assert [result["loss"] for result in of_seeds(many)] == [result["loss"] for result in results]
    assert json.loads((many / "summary.json").read_text())["top1_std"] == whole["top1_std"]
    assert {**row(tmp_path), "duration_s": "", "samples_per_s": "", "command_line": ""} == {
        **found, "duration_s": "", "samples_per_s": "", "command_line": "",
    }  # fmt: skip

    nameless = gpipe.run("eval", tmp_path, "checkpoint=many")
    assert (nameless.exit_code, nameless.error) == (
        2, "checkpoint=many: holds runs of several seeds; name one of them, the folder seed-N in it",
    )  # fmt: skip
    trained_on = gpipe.train(tmp_path, "resume=many")
    assert (trained_on.exit_code, trained_on.error) == (
        2, "resume=many: is a run of gpipe transfer; gpipe transfer resume=many goes on with it",
    )  # fmt: skip

    alone = transfer(gpipe, tmp_path / "alone", *words[:-3], "seed=6")
    assert alone.summary["loss"] == results[1]["loss"]


def test_the_classes_are_kept_and_checked_when_a_run_goes_on(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    words = ("dataset=digits", "dataset.samples_per_class=8", "image_size=8", "batch_size=16", "epochs=2", "threads=1")
    few = ("dataset.classes=[2,0]", "steps=1")
    before = gpipe.run("transfer", tmp_path, f"checkpoint={trained.run_dir}", *words, *few)
    assert before.exit_code == 0, before.stderr
    assert checkpoints.load_facts(before.checkpoint)["data"]["classes"] == ["2", "0"]
    other = gpipe.run("transfer", tmp_path, f"resume={before.run_dir}", "steps=2", "dataset.classes=[0,2]")
    assert other.exit_code == 1
    assert "was trained on 2 classes (2, 0), the data has 2 classes (0, 2): resume needs the same" in other.error
    elsewhere = gpipe.run("transfer", tmp_path, f"resume={before.run_dir}", "steps=2", "checkpoint=scratch")
    assert elsewhere.exit_code == 2
    assert ": the run has checkpoint=/" in elsewhere.error
    assert elsewhere.error.endswith(", not scratch; start a new run for that")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("model.filters=8",),
            "model.filters=8: the network of {checkpoint} has model.filters=4, so its body does not",
        ),
        (
            ("model.variant=B",),
            "model.variant=B: the network of {checkpoint} has model.variant=D, so its body does not",
        ),
        (("model=amoebanet_d", "image_size=64"), "model.layers=18: the network of {checkpoint} has model.layers=2, so"),
        (("batch_size=99",), "batch_size=99: synthetic has only 32 training samples; use at most that"),
        (("seeds=2", "batch_size=99"), "batch_size=99: synthetic has only 32 training samples; use at most that"),
        (("checkpoint=none",), "checkpoint=none: no such run directory, checkpoint or safetensors file"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line_and_leaves_nothing(
    gpipe: Any, trained: Any, tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    ended = gpipe.run("transfer", tmp_path, *SETTINGS, f"checkpoint={trained.run_dir}", *words)
    assert ended.exit_code == 2
    assert ended.error.startswith(problem.format(checkpoint=trained.checkpoint))
    assert not any((tmp_path / "results" / "runs").glob("*"))


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("dataset=cifar100", "gpipe train dataset=cifar10"),
        (
            "model.filters=8 dataset=cifar10 results_dir=out",
            "gpipe train model.filters=8 results_dir=out dataset=cifar100",
        ),
        ("dataset=digits dataset.classes=[5,6,7,8,9]", "gpipe train dataset=digits 'dataset.classes=[0,1,2,3,4]'"),
        ("model=amoebanet_b dataset=food101", "gpipe train model=amoebanet_b dataset=imagenet dataset.path=IMAGENET"),
    ],
)
def test_without_a_checkpoint_the_command_that_makes_one_is_told(
    gpipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpipe", "transfer", *words.split()])
    ended = gpipe.run("transfer", tmp_path, *words.split())
    assert (ended.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert ended.error.startswith("checkpoint=auto: no run of gpipe train with this network below ")
    assert ended.error.endswith(f"; make one with: {command}; or name a checkpoint")


TWO_LAYERS = """
    from collections import OrderedDict
    from torch import nn

    def layers(num_classes, width=4):
        body = nn.Sequential(nn.Flatten(), nn.Linear(192, width), nn.ReLU())
        return nn.Sequential(OrderedDict(body=body, scores=nn.Linear(width, num_classes), end=nn.Identity()))

    def in_one_layer(num_classes):
        return nn.Sequential(OrderedDict(all=nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))))
"""


def test_a_users_network_is_fine_tuned_likewise(gpipe: Any, tmp_path: Path) -> None:
    factory = gpipe.network(tmp_path, TWO_LAYERS)
    before = gpipe.train(tmp_path, *gpipe.tiny_module, factory, "run_dir=before")
    assert before.exit_code == 0, before.stderr
    old = checkpoints.load(tmp_path / "before/checkpoints/step-00000002")
    ended = transfer(gpipe, tmp_path, "checkpoint=before", "freeze=true", "epochs=2", "progress=plain")
    new = ended.tensors
    assert torch.equal(new["model/body.1.weight"], old["model/body.1.weight"])
    assert new["model/scores.weight"].shape == (3, 4)
    assert "new for 3 classes: scores.weight (10, 4) -> (3, 4), scores.bias (10) -> (3)" in ended.stderr

    wider = gpipe.run("transfer", tmp_path, *SETTINGS, "checkpoint=before", "model.kwargs.width=5", "run_dir=new")
    assert wider.exit_code == 2
    assert wider.error == (
        "model.kwargs={width:5}: the network of before/checkpoints/step-00000002 has model.kwargs={}, so its body does "
        "not fit; use that, or another checkpoint"
    )
    one = factory.replace(":layers", ":in_one_layer")
    frozen = gpipe.run("transfer", tmp_path, *SETTINGS, "checkpoint=before", one, "freeze=true", "run_dir=new")
    assert frozen.error == (
        "freeze=true: the network has all its parameters in all, its head; make the body layers of its own"
    )
    assert not (tmp_path / "new").exists()
