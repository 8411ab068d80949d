"""Counted randomness."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline import Pipeline
from gpipe_cli.pipeline.randomness import derive_seed


class AddZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.p


def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    del targets
    return outputs.sum(1).mean()


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_recomputation_draws_the_mask_of_the_forward_pass(step, partitions, micro_batches):
    def make() -> nn.Sequential:
        return nn.Sequential(AddZero(), nn.Dropout(0.5), nn.Identity())

    x = torch.ones(8, 1000)
    reports = [
        step(make, x, x, total, partitions=partitions, micro_batches=micro_batches, remat=remat, balance=balance)
        for remat in ("full", "none")
        for balance in ([3] if partitions == 1 else [2, 1], None)
    ]
    # out.sum(0) equals p's gradient of the sum: the loss is the mean of the masks' sums.
    for report in reports:
        assert report["gradients"]["0.p"].sum().item() == pytest.approx(report["losses"][0], rel=1e-6)
        assert torch.equal(report["gradients"]["0.p"], reports[0]["gradients"]["0.p"])
    assert 400 < reports[0]["gradients"]["0.p"].sum() < 1600


def test_a_mask_depends_on_step_seed_replica_and_micro_batch_but_not_on_earlier_draws():
    masks = {}

    def run(name: str, **options: int) -> None:
        step_number = options.pop("step", 0)
        seen = []
        dropout = nn.Dropout(0.5)
        dropout.register_forward_hook(lambda module, args, output: seen.append(output.detach() != 0))
        pipe = Pipeline(nn.Sequential(dropout), 1, 2, loss_fn=total, remat="none", **options)
        pipe.step = step_number
        pipe.forward_backward(torch.ones(2, 500), torch.ones(2, 500))
        masks[name] = seen

    run("first")
    torch.rand(17)
    run("again")
    run("later", step=1)
    run("seed", seed=1)
    run("replica", replica=1)
    assert all(torch.equal(a, b) for a, b in zip(masks["first"], masks["again"], strict=True))
    different = [masks["first"][0], masks["first"][1], *(masks[name][0] for name in ("later", "seed", "replica"))]
    assert len({tuple(mask.flatten().tolist()) for mask in different}) == 5


def test_the_callers_random_state_is_untouched_by_a_step():
    pipe = Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), loss_fn=total)
    before = torch.get_rng_state()
    pipe.forward_backward(torch.ones(2, 2), torch.ones(2, 2))
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_of_neighbouring_counters_differ():
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
