"""Tied parameters and the norm over all stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline import Pipeline


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    del targets
    return outputs.mean()


def tied() -> nn.Sequential:
    w = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(w.weight, 2.0)
    return nn.Sequential(w, nn.ReLU(), w)


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_layer_used_twice_has_one_summed_gradient_and_stays_one(step, partitions, micro_batches):
    x = torch.arange(1.0, 5.0, dtype=torch.float64).view(4, 1)
    report = step(tied, x, x, mean, partitions=partitions, micro_batches=micro_batches, lr=0.1)
    assert report["losses"] == [10.0]
    assert [g.item() for g in report["gradients"].values()] == [10.0, 10.0]
    assert report["state"]["0.weight"].item() == report["state"]["2.weight"].item() == 1.0
    assert report["num_parameters"] == 1


def test_declared_ties_between_factories_share_their_first_value_and_gradient(step):
    def make() -> list[Any]:
        return [("a", lambda: nn.Linear(3, 3)), ("b", nn.Tanh), ("c", lambda: nn.Linear(3, 3, bias=False)),
                ("d", lambda: nn.Linear(3, 3))]  # fmt: skip

    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    reports = [
        step(
            make,
            x,
            x,
            mean,
            partitions=k,
            micro_batches=2,
            ties=[["c.weight", "a.weight", "d.weight"]],
            lr=0.1,
            steps=2,
        )
        for k in (1, 2, 4)
    ]
    for report in reports:
        assert torch.equal(report["state"]["a.weight"], report["state"]["c.weight"])
        assert torch.equal(report["state"]["a.weight"], report["state"]["d.weight"])
        assert report["losses"] == reports[0]["losses"]
        assert torch.equal(report["state"]["a.weight"], reports[0]["state"]["a.weight"])


def test_gradients_of_tied_parameters_accumulate_over_mini_batches():
    pipe = Pipeline(tied(), 2, 1, loss_fn=mean)
    x = torch.arange(1.0, 5.0, dtype=torch.float64).view(4, 1)
    pipe.forward_backward(x, x)
    pipe.forward_backward(x, x)
    assert [p.grad.item() for p in pipe.parameters()] == [20.0, 20.0]


def test_ties_that_fit_nothing_are_refused():
    with pytest.raises(ValueError, match=r"ties: 'x\.weight' names no layer; layers are a"):
        Pipeline([("a", lambda: nn.Linear(1, 1))], loss_fn=mean, ties=[["a.weight", "x.weight"]])


def test_a_shared_batch_norm_is_refused_naming_both_layers():
    norm = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match="layers '0' and '2' share the buffer running_mean"):
        Pipeline(nn.Sequential(norm, nn.ReLU(), norm), loss_fn=mean)


class AddScaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.p = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor * self.p


def clipped_step(partitions: int, max_norm: float) -> dict[str, Any]:
    pipe = Pipeline(nn.Sequential(*[AddScaled(c) for c in (1.0, 2.0, 4.0, 10.0)]), partitions, 2, loss_fn=mean)
    x = torch.zeros(4, 1, dtype=torch.float64)
    pipe.forward_backward(x, x)
    norm = float(pipe.clip_grad_norm(max_norm))
    return {"norm": norm, "p": {name: -parameter.grad.item() for name, parameter in pipe.named_parameters()}}


@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_clipping_uses_the_norm_over_all_stages(run_ranks, partitions):
    reports = run_ranks(partitions, clipped_step, partitions, 1.0)
    assert [report["norm"] for report in reports] == [11.0] * partitions
    values = {name: value for report in reports for name, value in report["p"].items()}
    assert [values[f"{i}.p"] for i in range(4)] == pytest.approx([-1 / 11, -2 / 11, -4 / 11, -10 / 11], abs=1e-6)


def test_small_gradients_are_not_scaled_and_tied_ones_count_once():
    assert list(clipped_step(2, 100.0)["p"].values()) == [-1.0, -2.0, -4.0, -10.0]
    pipe = Pipeline(tied(), 2, 1, loss_fn=mean)
    x = torch.arange(1.0, 5.0, dtype=torch.float64).view(4, 1)
    pipe.forward_backward(x, x)
    assert float(pipe.clip_grad_norm(5.0)) == 10.0
    assert [p.grad.item() for p in pipe.parameters()] == pytest.approx([5.0, 5.0])
