"""Settings that cannot work: one line naming the key, exit code 2, and nothing written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("partitions=2", "balance=[2,2]"),
            "balance=[2,2]: sums to 4, the network has 6 layers; "
            "give one positive number of layers for each partition, or leave balance out",
        ),
        (
            ("partitions=7", "ranks=1"),
            "partitions=7: ",
        ),
        (("batch_size=64",), "batch_size=64: synthetic has only 32 training samples; use at most that"),
        (("dataset.size=3", "batch_size=8"), "batch_size=8: synthetic has only 3 training samples; use at most that"),
        (
            ("optimizer=timm", "optimizer.name=adamq"),
            "optimizer.name=adamq: unknown; did you mean ",
        ),
        (("optimizer.options.nonsense=1",), "optimizer.options.nonsense=1: adamw has no such option; it has "),
        (
            ("model.aux_weight=0.2",),
            "model.aux_weight=0.2: has no effect without model.aux_head=true; set that, or leave the weight out",
        ),
        (
            ("model.aux_head=true", "model.aux_weight=0"),
            "model.aux_head=true: has no effect with model.aux_weight=0; leave out one of them",
        ),
        (
            ("model.aux_head=true", "micro_batches=16"),
            "micro_batches=16: a micro-batch of 1 sample (batch_size=16, micro_batches=16) gives a batch norm a single "
            "value per channel: use fewer micro_batches, a larger batch_size or a larger image_size",
        ),
        (
            ("model.aux_head=true", "micro_batches=16", "partitions=2", "ranks=1", "cut=time"),
            "micro_batches=16: a micro-batch of 1 sample",
        ),
        (("run_dir=taken",), "run_dir=taken: is a file; name a folder"),
        (("run_dir=taken/run",), "run_dir=taken/run: cannot be written: Not a directory; name another folder"),
        (("results_dir=taken",), "results_dir=taken: taken is a file; name a folder"),
        (("results_dir=taken/sub", "run_dir=run"), "results_dir=taken/sub: "),
        (
            ("run_dir=other",),
            "run_dir=other: already holds a run; choose another folder, or resume=other to go on",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_setting_that_does_not_fit_is_refused_before_anything_is_written(
    gpipe: Any, tmp_path: Path, words: Any, line: str
) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 1}\n')
    before = sorted(tmp_path.rglob("*"))
    ended = gpipe.train(tmp_path, *gpipe.tiny, *words)
    assert ended.exit_code == 2
    assert ended.error.startswith(line)
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_pictures_must_be_named_and_exist(gpipe: Any, tmp_path: Path) -> None:
    words = ("dataset=folder", "model.layers=2", "model.filters=4", "threads=1", "partitions=2")
    unnamed = gpipe.train(tmp_path, *words)
    assert (unnamed.exit_code, unnamed.error.split(":")[0]) == (2, "dataset.path=null")
    missing = gpipe.train(tmp_path, *words, "dataset.path=photos")
    assert (missing.exit_code, missing.error.split(":")[0]) == (2, "dataset.path=photos")
    assert list(tmp_path.iterdir()) == []


NOT_LAYERS = """
    import torch
    from torch import nn

    def single():
        return nn.Linear(3, 3)

    def nothing():
        return None

    def twice():
        return [("a", nn.Flatten), ("a", nn.Flatten)]

    def unnamed():
        return [("a", nn.Flatten), nn.Flatten()]

    def five_outputs():
        return [("flat", nn.Flatten), ("linear", lambda: nn.Linear(192, 5))]

    def in_python(value):
        return value

    class Counts(nn.Module):
        def forward(self, x):
            return x + float(x.detach().sum())  # needs the values, which meta tensors do not have

    def looks_at_values(num_classes):
        return [("counts", Counts), ("flat", nn.Flatten), ("linear", lambda: nn.Linear(192, num_classes))]
"""


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("single", "returned Linear; return an nn.Sequential or a list of (name, factory)"),
        ("nothing", "returned NoneType; return an nn.Sequential or a list of (name, factory)"),
        ("twice", "two layers are named 'a': names must differ"),
        ("unnamed", "layer 1 is Flatten: give (name, factory or module)"),
        ("absent", "has no function absent; it has single, nothing, "),
    ],
)
def test_a_factory_that_gives_no_layers_is_refused(gpipe: Any, tmp_path: Path, function: str, problem: str) -> None:
    factory = gpipe.network(tmp_path, NOT_LAYERS).replace(":layers", f":{function}")
    ended = gpipe.train(tmp_path, *gpipe.tiny_module, factory)
    assert ended.exit_code == 2
    assert ended.error.startswith(f"{factory}: ")
    assert problem in ended.error
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "__pycache__"] == [".py"]


def test_a_missing_module_and_wrong_arguments_are_one_line(gpipe: Any, tmp_path: Path) -> None:
    missing = gpipe.train(tmp_path, *gpipe.tiny_module, "model.factory=no_such_module_here:layers")
    assert (missing.exit_code, missing.error.split(":")[0]) == (2, "model.factory=no_such_module_here")
    assert "there is no module no_such_module_here here or installed" in missing.error
    factory = gpipe.network(tmp_path, NOT_LAYERS).replace(":layers", ":in_python")
    wrong = gpipe.train(tmp_path, *gpipe.tiny_module, factory, "model.kwargs.size=3")
    assert wrong.exit_code == 2
    assert wrong.error.startswith("model.kwargs={size:3}: ")
    assert wrong.error.endswith("it has value")


def test_layers_that_cannot_be_counted_ask_for_another_cut_and_train_with_it(gpipe: Any, tmp_path: Path) -> None:
    factory = gpipe.network(tmp_path, NOT_LAYERS).replace(":layers", ":looks_at_values")
    words = (*gpipe.tiny_module, factory, "partitions=2", "ranks=1", "micro_batches=2")
    ended = gpipe.train(tmp_path, *words)
    assert ended.exit_code == 2
    assert ended.error.startswith("cut=flops: counting the layers' operations failed (")
    assert ended.error.endswith("; use cut=time or balance=[…]")
    for remedy in ("cut=time", "balance=[1,2]"):
        assert gpipe.train(tmp_path, *words, remedy).exit_code == 0


def test_a_network_for_other_classes_is_named_with_its_shape(gpipe: Any, tmp_path: Path) -> None:
    factory = gpipe.network(tmp_path, NOT_LAYERS).replace(":layers", ":five_outputs")
    ended = gpipe.train(tmp_path, *gpipe.tiny_module, factory)
    assert ended.exit_code == 1
    assert ended.error == (
        f"{factory}: the last layer returns (4, 5); expected logits (4, 10), one row a sample, one column a class, or "
        "a pair of them and auxiliary logits"
    )


def test_a_missing_tensorboard_is_found_before_the_run(
    gpipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    ended = gpipe.train(tmp_path, *gpipe.tiny, "tensorboard=true")
    assert (ended.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert ended.error == "tensorboard=true: needs the package tensorboard: pip install 'gpipe-cli[tensorboard]'"


def test_a_taken_port_is_named(gpipe: Any, tmp_path: Path) -> None:
    import socket

    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = str(server.getsockname()[1])
        ended = gpipe.train(tmp_path, *gpipe.tiny, "partitions=2", MASTER_PORT=port)
    assert ended.exit_code == 2
    assert ended.error.startswith(f"MASTER_PORT={port}: this port is already in use")
    assert list(tmp_path.iterdir()) == []
