"""Batch normalisation: normalise by the micro-batch, track the mini-batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline import Pipeline


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    del targets
    return outputs.mean()


def eight() -> torch.Tensor:
    return torch.arange(1.0, 9.0, dtype=torch.float64).view(8, 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("remat", ["full", "none"])
def test_running_statistics_move_once_by_those_of_the_mini_batch(step, schedule, micro_batches, remat):
    def make() -> nn.Sequential:
        identity = nn.Linear(1, 1, bias=False)
        nn.init.ones_(identity.weight)
        return nn.Sequential(identity, nn.BatchNorm1d(1)).double()

    for partitions in (1, 2):
        state = step(
            make,
            eight(),
            eight(),
            mean,
            partitions=partitions,
            micro_batches=micro_batches,
            remat=remat,
            schedule=schedule,
        )["state"]
        assert state["1.running_mean"].item() == pytest.approx(0.45, abs=1e-12)
        assert state["1.running_var"].item() == pytest.approx(1.5, abs=1e-12)
        assert state["1.num_batches_tracked"].item() == 1


def test_training_normalises_by_the_micro_batch():
    seen = []
    layer = nn.BatchNorm1d(1, affine=False).double()
    layer.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    Pipeline(nn.Sequential(layer), 1, 2, loss_fn=mean, remat="none").forward_backward(eight(), eight())
    for output, part in zip(seen, eight().split(4), strict=True):
        torch.testing.assert_close(output, (part - part.mean()) / (part.var(correction=0) + layer.eps).sqrt())


def test_several_steps_equal_torchs_statistics_of_whole_mini_batches():
    torch.manual_seed(0)
    ours, reference = nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    pipe = Pipeline(nn.Sequential(ours), 1, 3, loss_fn=mean)
    for _ in range(4):
        x = torch.randn(7, 3, 5, 4, dtype=torch.float64) * 3 + 100
        pipe.forward_backward(x, x)
        reference(x)
    for a, b in zip(ours.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_cumulative_average_and_untracked_layers_work_as_in_torch():
    torch.manual_seed(0)
    cumulative, untracked = (
        nn.BatchNorm1d(1, momentum=None).double(),
        nn.BatchNorm1d(1, track_running_stats=False).double(),
    )
    pipe = Pipeline(nn.Sequential(cumulative, untracked), 1, 2, loss_fn=mean)
    reference = nn.BatchNorm1d(1, momentum=None).double()
    for factor in (1.0, 3.0):
        pipe.forward_backward(eight() * factor, eight())
        reference(eight() * factor)
    torch.testing.assert_close(cumulative.running_mean, reference.running_mean)
    torch.testing.assert_close(cumulative.running_var, reference.running_var)


def test_frozen_layers_in_evaluation_mode_keep_their_statistics():
    layer = nn.BatchNorm1d(1).double().eval()
    Pipeline(nn.Sequential(layer), 1, 2, loss_fn=mean).forward_backward(eight(), eight())
    assert layer.running_mean.item() == 0.0
    assert layer.num_batches_tracked.item() == 0


def test_outside_the_pipeline_the_layer_behaves_as_before_and_copies_are_independent():
    layer = nn.BatchNorm1d(1).double()
    pipe = Pipeline(nn.Sequential(layer), 1, 2, loss_fn=mean)
    pipe.forward_backward(eight(), eight())
    clone = copy.deepcopy(pipe.module)
    layer(eight())
    assert layer.num_batches_tracked.item() == 2
    assert clone.get_submodule("0").num_batches_tracked.item() == 1
    clone.get_submodule("0")(eight())
    assert clone.get_submodule("0").num_batches_tracked.item() == 2


def test_a_failed_step_leaves_no_moments_behind():
    layer = nn.BatchNorm1d(1).double()
    calls = []

    def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return mean(outputs, targets)

    pipe = Pipeline(nn.Sequential(layer), 1, 2, loss_fn=failing)
    with pytest.raises(RuntimeError, match="planted"):
        pipe.forward_backward(eight() * 50, eight())
    assert layer.running_mean.item() == 0.0
    pipe.forward_backward(eight(), eight())
    assert layer.running_mean.item() == pytest.approx(0.45)


def test_a_micro_batch_of_one_value_per_channel_is_refused():
    pipe = Pipeline(nn.Sequential(nn.BatchNorm1d(1)).double(), 1, 8, loss_fn=mean)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        pipe.forward_backward(eight(), eight())
