"""Every knob has its effect, and only that; what is about speed or output changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

FOUR_STEPS = ("epochs=2",)


@pytest.fixture(scope="module")
def plain(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that the others are compared with."""
    return gpipe.train(tmp_path_factory.mktemp("plain"), *gpipe.tiny, *FOUR_STEPS)


@pytest.fixture
def run(gpipe: Any, tmp_path: Path) -> Any:
    def train(*words: str) -> Any:
        ended = gpipe.train(tmp_path / "-".join(words), *gpipe.tiny, *FOUR_STEPS, *words)
        assert ended.exit_code == 0, ended.stderr
        return ended

    return train


@pytest.mark.parametrize(
    "words",
    [
        ("workers=2", "log_every=1", "progress=none", "keep_checkpoints=1"),
        ("partitions=2", "cut=time", "eval_batch_size=1"),
        ("eval_every=0", "checkpoint_every=0"),
    ],
    ids=" ".join,
)
def test_what_is_not_about_the_training_changes_no_number(run: Any, plain: Any, gpipe: Any, words: Any) -> None:
    ended = run(*words)
    assert ended.steps == plain.steps
    assert ended.evaluations[-1] == pytest.approx(plain.evaluations[-1], rel=1e-6)  # sums over other batches
    assert gpipe.same_tensors(ended.tensors, plain.tensors)


@pytest.mark.parametrize(
    ("words", "first_step_differs"),
    [
        (("seed=1",), True),
        (("label_smoothing=0.4",), True),
        (("model.dropout=0.5",), True),
        (("model.aux_head=true",), True),
        (("dataset.augment=light",), True),
        (("precision=bf16",), True),
        (("micro_batches=2",), True),  # batch norm sees other samples together
        (("model.bn_eps=0.1",), True),
        (("model.drop_path=0.5",), False),  # nothing is dropped at first
        (("optimizer.lr=0.001",), False),
        (("optimizer.weight_decay=0.5",), False),
        (("lr_schedule.warmup_epochs=2",), False),
        (("clip_grad_norm=0.1", "optimizer=sgd"), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_about_the_training_changes_it(
    run: Any, plain: Any, words: tuple[str, ...], first_step_differs: bool
) -> None:
    ended = run(*words)
    assert (ended.losses[0] != plain.losses[0]) == first_step_differs
    assert ended.losses[-1] != plain.losses[-1]


def test_evaluation_and_checkpoints_come_when_asked(run: Any) -> None:
    ended = run("epochs=4", "eval_every=3", "checkpoint_every=2", "keep_checkpoints=9", "log_every=3")
    assert [epoch for epoch, _, _ in ended.evaluations] == [2, 3]  # the last epoch always
    assert sorted(path.name for path in (ended.run_dir / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]
    assert [row["step"] for row in ended.rows if "loss" in row] == [3, 6, 8]


def test_zero_means_only_at_the_end(run: Any) -> None:
    ended = run("epochs=3", "eval_every=0", "checkpoint_every=0", "log_every=1000")
    assert [(row["step"], "top1" in row) for row in ended.rows] == [(6, False), (6, True)]
    assert [path.name for path in (ended.run_dir / "checkpoints").iterdir()] == ["step-00000006"]
    assert [path.name for path in (ended.run_dir / "best").iterdir()] == ["step-00000006"]


def test_the_average_is_evaluated_and_the_training_goes_on_without_it(run: Any, plain: Any, gpipe: Any) -> None:
    ended = run("ema_decay=0.5")
    assert ended.steps == plain.steps
    assert [loss for *_, loss in ended.evaluations] != [loss for *_, loss in plain.evaluations]
    weights = {key: tensor for key, tensor in ended.tensors.items() if key.startswith(("model/", "optimizer/"))}
    assert gpipe.same_tensors(weights, plain.tensors)


def test_gradients_are_clipped_by_their_norm_over_all_stages(run: Any) -> None:
    whole = run("clip_grad_norm=0.1", "optimizer=sgd")
    cut = run("clip_grad_norm=0.1", "optimizer=sgd", "partitions=3", "ranks=1")
    assert cut.steps == whole.steps
    assert run("optimizer=sgd").losses[-1] != whole.losses[-1]


def test_mixed_precision_is_the_same_for_every_cut_and_near_full_precision(run: Any, plain: Any) -> None:
    whole, cut = run("precision=bf16"), run("precision=bf16", "partitions=2")
    assert cut.losses == pytest.approx(whole.losses, rel=1e-2)
    assert whole.losses[0] == pytest.approx(plain.losses[0], rel=5e-2)
    stored = [tensor.dtype for tensor in whole.tensors.values() if tensor.is_floating_point()]
    assert set(stored) == {torch.float32}


def test_the_auxiliary_head_counts_by_its_weight_and_is_cut_too(run: Any) -> None:
    light, heavy = run("model.aux_head=true", "model.aux_weight=0.1"), run("model.aux_head=true")
    assert heavy.losses[0] > light.losses[0]
    # The loss is main + weight * auxiliary, so two weights give both parts.
    auxiliary = (heavy.losses[0] - light.losses[0]) / 0.3
    assert heavy.losses[0] - 0.4 * auxiliary == pytest.approx(light.losses[0] - 0.1 * auxiliary)
    assert 1 < auxiliary < 5
    cut = run("model.aux_head=true", "partitions=4", "balance=[2,2,2,1]")
    assert cut.steps == heavy.steps


def test_the_memory_format_changes_rounding_only(run: Any, plain: Any) -> None:
    ended = run("channels_last=false")
    assert ended.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)


def test_layers_are_told_how_far_the_training_is(gpipe: Any, tmp_path: Path) -> None:
    source = """
        from functools import partial
        from torch import nn

        class Tells(nn.Flatten):
            def set_progress(self, fraction):
                with open("progress.txt", "a") as file:
                    file.write(f"{fraction:.3f} ")

        def layers(num_classes, image_size):
            return [("tells", Tells), ("linear", partial(nn.Linear, 3 * image_size**2, num_classes))]
    """
    words = (
        *gpipe.tiny_module,
        gpipe.network(tmp_path, source),
        "epochs=2",
        "steps=3",
        "partitions=2",
        "balance=[1,1]",
    )
    assert gpipe.train(tmp_path, *words).exit_code == 0
    # Shares of the epochs, though the run stops after three of their four steps.
    assert (tmp_path / "progress.txt").read_text() == "0.000 0.250 0.500 "


def test_a_stage_without_parameters_trains_saves_and_resumes(gpipe: Any, tmp_path: Path) -> None:
    whole_folder, cut_folder = tmp_path / "whole", tmp_path / "cut"
    settings = (*gpipe.tiny_module, "epochs=2", "ema_decay=0.9", "clip_grad_norm=0.5")
    whole = gpipe.train(whole_folder, *settings, gpipe.network(whole_folder))
    words = (*settings, gpipe.network(cut_folder), "partitions=3", "balance=[1,3,1]")
    first = gpipe.train(cut_folder, *words, "steps=3")
    assert first.exit_code == 0, first.stderr
    ended = gpipe.train(cut_folder, f"resume={first.run_dir}", "steps=null")
    assert ended.exit_code == 0, ended.stderr
    assert ended.steps == whole.steps
    assert gpipe.same_tensors(ended.tensors, whole.tensors)
    assert ended.summary["peak_memory_bytes_per_rank"][1] > 0


def test_a_list_of_modules_is_a_network_too(gpipe: Any, tmp_path: Path) -> None:
    source = """
        from torch import nn

        def layers(num_classes, image_size):
            return [nn.Flatten(), nn.Linear(3 * image_size**2, num_classes)]
    """
    runs = [
        gpipe.train(folder, *gpipe.tiny_module, gpipe.network(folder, source), f"partitions={k}")
        for k, folder in ((1, tmp_path / "one"), (2, tmp_path / "two"))
    ]
    assert [run.exit_code for run in runs] == [0, 0]
    assert gpipe.same_tensors(runs[0].tensors, runs[1].tensors)
    assert runs[0].summary["model"].endswith(":layers")
