"""The training loop: what it does each step, when it stops, what it counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.errors import TrainingError
from gpipe_cli.reporting.report import RunReport
from gpipe_cli.training.loop import Clock, Trainer, peak_memory_bytes
from gpipe_cli.training.session import Session

MakeSession = Callable[..., Session]


def train(session: Session, run_dir: Path, start: int = 0) -> tuple[Any, list[dict[str, Any]]]:
    resumed_from = start if start else None
    report = RunReport(
        run_dir, progress="none", num_steps=session.num_steps, resumed_from=resumed_from, tensorboard=False
    )
    try:
        outcome = Trainer(session=session, run_dir=run_dir, report=report, start=start).run()
    finally:
        report.close()
    return outcome, [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_loop_trains_like_an_ordinary_one(make_session: MakeSession, tmp_path: Path) -> None:
    """With one micro-batch, against a loop written out here over the same layers and batches."""
    from gpipe_cli.data.loaders import train_loader

    words = ("micro_batches=1", "epochs=2", "optimizer=sgd", "label_smoothing=0", "remat=none", "channels_last=false")
    session = make_session(*words)
    _, rows = train(session, tmp_path)
    ordinary = make_session(*words)
    network = torch.nn.Sequential(*ordinary.pipe.module.children())
    losses, config = [], ordinary.config
    for epoch in range(2):
        loader = train_loader(
            config.dataset, ordinary.info, image_size=8, batch_size=16, workers=0, seed=config.seed, epoch=epoch
        )
        for images, labels in loader:
            for group in ordinary.optimizer.param_groups:
                group["lr"] = ordinary.lr_schedule.lr_at(len(losses))
            ordinary.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(images), labels)
            loss.backward()
            ordinary.optimizer.step()
            losses.append(loss.item())
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, rel=1e-5)
    for mine, other in zip(session.pipe.parameters(), network.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_the_outcome_counts_what_was_done(make_session: MakeSession, tmp_path: Path) -> None:
    outcome, rows = train(make_session("epochs=2"), tmp_path)
    assert outcome.steps == 4
    assert (outcome.clock.num_steps, outcome.clock.num_samples) == (3, 48)  # the first is start-up
    assert outcome.train_loss == [row["loss"] for row in rows if "loss" in row][-1]
    assert outcome.evaluation.num_samples == 6
    assert outcome.peak_memory_bytes > 2**20


def test_each_step_has_the_rate_of_the_schedule(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session("epochs=3", "lr_schedule=step", "lr_schedule.decay_epochs=1")
    _, rows = train(session, tmp_path)
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates == [session.lr_schedule.lr_at(step) for step in range(6)]
    assert rates == pytest.approx([0.004, 0.004, 0.0004, 0.0004, 0.00004, 0.00004])


def test_evaluations_change_no_step(make_session: MakeSession, tmp_path: Path, gpipe: Any) -> None:
    often, seldom = (
        make_session("epochs=2", "model.dropout=0.5"),
        make_session("epochs=2", "model.dropout=0.5", "eval_every=0"),
    )
    train(often, tmp_path / "often")
    train(seldom, tmp_path / "seldom")
    assert gpipe.same_tensors(often.pipe.state_dict(), seldom.pipe.state_dict())


def test_a_loss_that_is_no_number_stops_before_it_reaches_the_weights(
    make_session: MakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session("epochs=2")
    weights: list[torch.Tensor] = []
    forward_backward = session.pipe.forward_backward

    def poisoned(images: Any, labels: Any) -> Any:
        if session.pipe.step == 2:
            weights.extend(tensor.clone() for tensor in session.pipe.parameters())
            images = images * float("nan")
        return forward_backward(images, labels)

    monkeypatch.setattr(session.pipe, "forward_backward", poisoned)
    with pytest.raises(TrainingError, match="the loss is nan at step 3: stopped, and checkpoints are as they were; "):
        train(session, tmp_path)
    assert all(torch.equal(one, now) for one, now in zip(weights, session.pipe.parameters(), strict=True))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_the_clock_leaves_the_first_step_out() -> None:
    clock = Clock()
    clock.add(16, 100.0, 90.0)
    assert (clock.num_steps, clock.step_s) == (0, 0.0)
    clock.add(16, 2.0, 0.5)
    clock.add(16, 3.0, 0.5)
    assert (clock.num_steps, clock.num_samples, clock.step_s, clock.wait_s) == (2, 32, 5.0, 1.0)


def test_memory_is_in_bytes() -> None:
    assert 50e6 < peak_memory_bytes(torch.device("cpu")) < 50e9  # torch alone takes more than the lower bound
