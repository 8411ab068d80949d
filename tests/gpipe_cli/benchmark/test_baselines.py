"""A comparison is fair when all sides compute the same: losses of ours and of every baseline over some steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.benchmark.baselines import SingleSubject, TorchSubject, make_subject
from gpipe_cli.benchmark.grid import Case
from gpipe_cli.benchmark.subjects import CHANNELS_LAST, CONTIGUOUS, Ingredients, PipelineSubject, gather_ingredients
from gpipe_cli.compose import load
from gpipe_cli.distributed.launch import RankContext
from gpipe_cli.pipeline import make_process_groups


class Pair(nn.Module):
    """Gives two tensors, as AmoebaNet's cells do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value, self.conv(value).relu()


class Joined(nn.Module):
    """Takes both."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return (value[0] + value[1]).mean((2, 3))


LAYERS = [
    ("stem", partial(nn.Conv2d, 3, 4, 3, padding=1, dtype=torch.float64)),
    ("pair", Pair),
    ("joined", Joined),
    ("head", partial(nn.Linear, 4, 5, dtype=torch.float64)),
]
# The cut is behind the layer that gives a tuple.
BALANCE = (2, 2)


def ingredients(baseline: str | None, remat: str, groups: Any, optimizer: str = "sgd") -> Ingredients:
    config = load("bench", ["optimizer=sgd", "optimizer.lr=0.05", "seed=3", f"optimizer={optimizer}"])
    pipeline = baseline != "single"
    case = Case(
        model=config.model, partitions=2 if pipeline else 1, micro_batches=4 if pipeline else 1, batch_size=8,
        image_size=6, num_classes=5, remat=remat, schedule="gpipe", baseline=baseline,
        balance=BALANCE if pipeline else None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return Ingredients(
        config=config,
        case=case,
        layers=LAYERS,
        inputs=torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64),
        targets=torch.randint(5, (8,), generator=generator),
        loss_fn=nn.functional.cross_entropy,
        device=torch.device("cpu"),
        groups=groups,
    )


def losses(baseline: str | None, remat: str, layout: str | None = None) -> dict[str, Any]:
    """Runs in every rank: the losses of three steps, empty on a rank that does not know them."""
    groups = make_process_groups([range(2)]) if baseline != "single" else None
    subject = make_subject(ingredients(baseline, remat, groups))
    if layout is not None:
        subject.use(layout)
    found = []
    for _ in range(3):
        facts = subject.step()
        loss = subject.loss()
        found += [] if loss is None else [loss]
    return {"losses": found, "recomputed": facts.num_rematerializations, "parameters": subject.num_parameters}


@pytest.mark.parametrize("layout", [CHANNELS_LAST, CONTIGUOUS])
@pytest.mark.parametrize("remat", ["full", "none"])
def test_torch_and_a_plain_loop_compute_our_losses(run_ranks, remat: str, layout: str) -> None:
    plain = losses("single", "none")
    ours = run_ranks(2, losses, None, remat, None)
    theirs = run_ranks(2, losses, "torch", remat, layout)
    assert ours[0]["losses"] == pytest.approx(plain["losses"], rel=1e-12)
    assert theirs[1]["losses"] == pytest.approx(plain["losses"], rel=1e-12)
    assert len(set(plain["losses"])) == 3  # the weights were updated
    assert theirs[0]["parameters"] == ours[0]["parameters"] == plain["parameters"]


def test_each_baseline_is_what_it_says() -> None:
    assert isinstance(make_subject(ingredients("single", "none", None)), SingleSubject)
    assert isinstance(make_subject(ingredients("naive", "none", None)), PipelineSubject)
    assert isinstance(make_subject(ingredients(None, "none", None)), PipelineSubject)


def stage_calls(remat: str) -> int:
    """How often the first layer of the rank ran in a step after the first, which also infers shapes."""
    subject = TorchSubject(ingredients("torch", remat, make_process_groups([range(2)])))
    subject.step()
    first = next(iter(subject._stage.children()))
    calls: list[int] = []
    first.register_forward_hook(lambda *_: calls.append(1))
    subject.step()
    return len(calls)


def test_a_checkpointed_stage_runs_twice_and_a_plain_one_once(run_ranks) -> None:
    assert run_ranks(2, stage_calls, "full") == [8, 8]
    assert run_ranks(2, stage_calls, "none") == [4, 4]


def test_a_plain_loop_works_in_both_layouts_unless_one_is_asked_for() -> None:
    subject = SingleSubject(ingredients("single", "none", None))
    assert subject.layouts == (CHANNELS_LAST, CONTIGUOUS)
    subject.use(CONTIGUOUS)
    assert subject._inputs.is_contiguous()
    subject.use(CHANNELS_LAST)
    assert subject._inputs.is_contiguous(memory_format=torch.channels_last)


def text_losses(baseline: str | None, remat: str, tied: bool) -> dict[str, Any]:
    """Runs in every rank: losses of three steps of a tiny Transformer, and what this rank holds for it."""
    pipeline = baseline != "single"
    groups = make_process_groups([range(2)]) if pipeline else None
    config = load("bench", [
        "model=transformer", "model.layers=2", "model.width=8", "model.num_heads=2", "model.ff_width=16",
        "model.vocab_size=11", "model.seq_len=6", f"model.tied={tied}".lower(), "optimizer.lr=0.05",
    ])  # fmt: skip
    case = Case(
        model=config.model, partitions=2 if pipeline else 1, micro_batches=4 if pipeline else 1, batch_size=8,
        image_size=None, num_classes=11, remat=remat, schedule="gpipe", baseline=baseline,
        balance=(2, 3) if pipeline else None,
    )  # fmt: skip
    context = RankContext(rank=0, world_size=1, local_rank=0, device="cpu", num_threads=1)
    subject = make_subject(gather_ingredients(config, case, context, groups))
    found = []
    for _ in range(3):
        subject.step()
        loss = subject.loss()
        found += [] if loss is None else [loss]
    return {"losses": found, "parameters": subject.num_parameters, "layouts": subject.layouts}


@pytest.mark.parametrize("remat", ["full", "none"])
def test_all_contenders_compute_the_same_losses_on_text(run_ranks, remat: str) -> None:
    plain = text_losses("single", "none", False)
    ours = run_ranks(2, text_losses, None, remat, False)
    theirs = run_ranks(2, text_losses, "torch", remat, False)
    assert ours[0]["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert theirs[1]["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert plain["losses"][0] > plain["losses"][2]
    assert theirs[0]["parameters"] == ours[0]["parameters"] == plain["parameters"]
    assert plain["layouts"] == ours[0]["layouts"] == theirs[0]["layouts"] == (CONTIGUOUS,)  # nothing to choose


def test_a_shared_matrix_is_one_for_the_plain_loop_and_for_us(run_ranks) -> None:
    plain = text_losses("single", "none", True)
    ours = run_ranks(2, text_losses, None, "full", True)
    assert ours[0]["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert ours[0]["parameters"] == plain["parameters"]
    assert plain["parameters"] == text_losses("single", "none", False)["parameters"] - 11 * 8
