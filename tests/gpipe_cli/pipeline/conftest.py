"""The engine's harness: one training step through the pipeline in K processes, and the same without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline import Pipeline

Report = dict[str, Any]


def pipeline_step(
    make: Callable[[], Any], x: Any, y: Any, loss_fn: Any, options: dict[str, Any], steps: int = 1
) -> Report:
    """Runs in every rank: ``steps`` mini-batches on the same data; this rank's losses, gradients and state."""
    options = dict(options)
    lr = options.pop("lr", 0.0)
    pipe = Pipeline(make(), loss_fn=loss_fn, **options)
    losses = []
    for _ in range(steps):
        for parameter in pipe.parameters():
            parameter.grad = None
        result = pipe.forward_backward(x, y)
        losses.append(float(result.loss))
        if lr:
            with torch.no_grad():
                for parameter in pipe.parameters():
                    if parameter.grad is not None:
                        parameter -= lr * parameter.grad
    gradients = {name: p.grad for name, p in pipe.module.named_parameters(remove_duplicate=False)}
    return {
        "losses": losses,
        "gradients": {name: g.clone() for name, g in gradients.items() if g is not None},
        "without_gradient": [name for name, g in gradients.items() if g is None],
        "state": {name: t.clone() for name, t in pipe.state_dict().items()},
        "num_rematerializations": result.num_rematerializations,
        "num_samples": result.num_samples,
        "balance": list(pipe.balance),
        "num_parameters": pipe.num_parameters,
    }


def merged(reports: list[Report]) -> Report:
    """One report from those of all ranks: losses must agree, the parts are put together."""
    first = dict(reports[0])
    for other in reports[1:]:
        assert other["losses"] == first["losses"]
        for key in ("gradients", "state"):
            first[key] = {**first[key], **other[key]}
        first["without_gradient"] = first["without_gradient"] + other["without_gradient"]
        first["num_rematerializations"] += other["num_rematerializations"]
    return first


@pytest.fixture
def step(run_ranks: Callable[..., list[Any]]) -> Callable[..., Report]:
    """``step(make, x, y, loss, partitions=K, micro_batches=M, ranks=K, …)``: make() gives the layers."""

    def run(
        make: Callable[[], Any],
        x: Any,
        y: Any,
        loss_fn: Any,
        *,
        partitions: int = 1,
        micro_batches: int = 1,
        ranks: int | None = None,
        steps: int = 1,
        **options: Any,
    ) -> Report:
        options |= {"num_partitions": partitions, "num_micro_batches": micro_batches}
        num_ranks = ranks if ranks is not None else partitions
        if num_ranks == 1:
            return pipeline_step(make, x, y, loss_fn, options, steps)
        return merged(run_ranks(num_ranks, pipeline_step, make, x, y, loss_fn, options, steps))

    return run


def plain_step(
    make: Callable[[], nn.Sequential], x: Any, y: Any, loss_fn: Any, lr: float = 0.0, steps: int = 1
) -> Report:
    """The same mini-batches by ordinary PyTorch."""
    model = make()
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                if lr and parameter.grad is not None:
                    parameter -= lr * parameter.grad
    gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return {
        "losses": losses,
        "gradients": {name: g for name, g in gradients.items() if g is not None},
        "without_gradient": [name for name, g in gradients.items() if g is None],
        "state": {name: t.clone() for name, t in model.state_dict().items()},
    }


@pytest.fixture
def plain() -> Callable[..., Report]:
    """``plain(make, x, y, loss)``: see :func:`plain_step`."""
    return plain_step


@pytest.fixture
def assert_same() -> Callable[[Report, Report, float], None]:
    """``assert_same(a, b, tolerance)``: losses, gradients and state; tolerance 0 means bit for bit."""

    def check(a: Report, b: Report, tolerance: float = 0.0) -> None:
        assert a["losses"] == pytest.approx(b["losses"], rel=tolerance, abs=tolerance)
        for key in ("gradients", "state"):
            assert a[key].keys() == b[key].keys()
            for name in a[key]:
                torch.testing.assert_close(
                    a[key][name], b[key][name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert sorted(a["without_gradient"]) == sorted(b["without_gradient"])

    return check
