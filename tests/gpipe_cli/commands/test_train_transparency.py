"""A run gives the same numbers however it is cut, hosted and re-materialized."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def whole(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The network uncut, in one process."""
    return gpipe.train(tmp_path_factory.mktemp("whole"), *gpipe.tiny, "epochs=2", "model.dropout=0.2")


@pytest.mark.parametrize(
    "words",
    [
        ("partitions=2",),
        ("partitions=4",),
        ("partitions=4", "balance=[1,1,3,1]"),
        ("partitions=4", "ranks=2"),
        ("partitions=4", "ranks=1"),
        ("partitions=2", "balance=[1,5]", "remat=none"),
        ("partitions=2", "remat=except_last", "workers=1"),
    ],
    ids=" ".join,
)
def test_losses_and_weights_do_not_depend_on_the_cut(gpipe: Any, whole: Any, tmp_path: Path, words: Any) -> None:
    cut = gpipe.train(tmp_path, *gpipe.tiny, "epochs=2", "model.dropout=0.2", *words)
    assert cut.exit_code == 0, cut.stderr
    assert cut.steps == whole.steps
    assert len(cut.steps) == 4
    assert cut.evaluations == whole.evaluations
    assert gpipe.same_tensors(cut.tensors, whole.tensors)


def test_initial_weights_do_not_depend_on_the_cut_and_differ_between_layers(gpipe: Any, tmp_path: Path) -> None:
    runs = [gpipe.train(tmp_path / str(k), *gpipe.tiny, "epochs=0", f"partitions={k}") for k in (1, 4)]
    assert [run.exit_code for run in runs] == [0, 0]
    assert gpipe.same_tensors(runs[0].tensors, runs[1].tensors)
    random = [tensor for tensor in runs[0].tensors.values() if tensor.dim() == 4 and tensor.numel() > 8]
    assert not any(
        one.shape == other.shape and one.equal(other) for i, one in enumerate(random) for other in random[:i]
    )


def test_the_order_of_the_schedule_changes_rounding_only(gpipe: Any, whole: Any, tmp_path: Path) -> None:
    run = gpipe.train(tmp_path, *gpipe.tiny, "epochs=2", "model.dropout=0.2", "partitions=2", "schedule=1f1b")
    assert run.exit_code == 0, run.stderr
    assert run.losses == pytest.approx(whole.losses, rel=1e-3)
    assert run.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)  # before any update


@pytest.fixture(scope="module")
def few_micro_batches(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """A network without batch norm at K = 4, with as many micro-batches, fewer, one, and an uneven number."""
    folders = {m: tmp_path_factory.mktemp(f"few-{m}") for m in (4, 3, 2, 1)}
    return {
        m: gpipe.train(folder, *gpipe.tiny_module, gpipe.network(folder), "partitions=4", f"micro_batches={m}")
        for m, folder in folders.items()
    }


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_fewer_micro_batches_than_partitions_complete_with_the_same_loss(
    few_micro_batches: dict[int, Any], num_micro_batches: int
) -> None:
    run, reference = few_micro_batches[num_micro_batches], few_micro_batches[4]
    assert (run.exit_code, reference.exit_code) == (0, 0), run.stderr
    assert run.losses == pytest.approx(reference.losses, rel=1e-5)
    assert run.evaluations[0][2] == pytest.approx(reference.evaluations[0][2], rel=1e-5)
    assert "is less than partitions=4: each partition idles about" in run.stderr
    assert "idles" not in reference.stderr


def test_the_loss_on_show_is_the_mean_over_the_samples(few_micro_batches: dict[int, Any]) -> None:
    for run in few_micro_batches.values():
        assert run.losses[0] == pytest.approx(math.log(10), abs=0.7)  # divided by M, or summed, it would be far off
