"""The learning rate of every step: continuous, bounded, at its minimum in the end, and the same after a resume."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from gpipe_cli.config import LrScheduleConfig
from gpipe_cli.training.lr_schedule import LrSchedule, describe_horizon_change

KINDS = ("constant", "cosine", "exponential", "step")


def schedule(
    name: str, *, base_lr: float = 1.0, steps_per_epoch: int = 10, epochs: int = 10, **settings: Any
) -> LrSchedule:
    defaults: dict[str, Any] = {"warmup_epochs": 0.0, "decay_rate": 0.9, "decay_epochs": 1.0, "min_lr": 0.0}
    return LrSchedule(LrScheduleConfig(**{"name": name, **defaults, **settings}), base_lr, steps_per_epoch, epochs)


def rates(lr_schedule: LrSchedule) -> list[float]:
    return [lr_schedule.lr_at(step) for step in range(lr_schedule.num_steps)]


def test_warm_up_rises_in_equal_steps_to_the_base_rate() -> None:
    found = rates(schedule("cosine", warmup_epochs=2))
    assert found[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert found[19] == 1.0


@pytest.mark.parametrize("warmup_epochs", [0, 0.05, 0.1, 2, 9])
def test_cosine_is_continuous_after_warm_up_and_ends_a_step_before_its_minimum(warmup_epochs: float) -> None:
    lr_schedule = schedule("cosine", warmup_epochs=warmup_epochs, min_lr=0.1)
    found = rates(lr_schedule)
    peak = max(round(warmup_epochs * 10) - 1, 0)
    after = found[peak:]
    assert after[0] == pytest.approx(1.0)
    assert all(earlier > later for earlier, later in pairwise(after))
    length = len(after)  # half a cosine over these steps, whose minimum is where the next step would be
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * i / length)) for i in range(length)]
    assert after == pytest.approx(expected)
    assert lr_schedule.lr_at(lr_schedule.num_steps) == pytest.approx(0.1)


def test_exponential_is_the_references_staircase() -> None:
    # The authors' command line: 0.64, 3 epochs of warm-up, 0.9 every epoch counted from the first step.
    found = rates(schedule("exponential", base_lr=0.64, warmup_epochs=3, steps_per_epoch=7, epochs=8))
    assert found[20] == pytest.approx(0.64)
    for step in range(21, 56):
        assert found[step] == pytest.approx(0.64 * 0.9 ** (step // 7))
    # The authors' library: 0.97 every 2.4 epochs.
    found = rates(schedule("exponential", decay_rate=0.97, decay_epochs=2.4, steps_per_epoch=5, epochs=10))
    assert found == pytest.approx([0.97 ** (step // 12) for step in range(50)])


def test_step_counts_from_the_end_of_warm_up() -> None:
    found = rates(schedule("step", decay_rate=0.1, decay_epochs=3, warmup_epochs=1))
    assert found[9] == 1.0
    assert found[10:] == pytest.approx([0.1 ** ((step - 9) // 30) for step in range(10, 100)])


def test_rate_never_falls_below_the_minimum() -> None:
    assert min(rates(schedule("exponential", decay_rate=0.1, min_lr=0.01))) == 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup_epochs", "epochs"), [(2, 2), (5, 2), (0, 1), (1, 1), (0, 0), (3, 0), (0.5, 3)])
@pytest.mark.parametrize("steps_per_epoch", [1, 7])
def test_rates_at_the_edges_are_finite_and_between_zero_and_the_base(
    kind: str, warmup_epochs: float, epochs: int, steps_per_epoch: int
) -> None:
    lr_schedule = schedule(kind, warmup_epochs=warmup_epochs, epochs=epochs, steps_per_epoch=steps_per_epoch)
    for step in range(lr_schedule.num_steps + 2):
        assert 0 <= lr_schedule.lr_at(step) <= 1


def test_warm_up_longer_than_training_ends_at_its_share_of_the_base_rate() -> None:
    assert rates(schedule("cosine", warmup_epochs=5, epochs=2))[-1] == pytest.approx(2 / 5)


@pytest.mark.parametrize("kind", KINDS)
def test_rate_depends_on_the_step_alone(kind: str) -> None:
    in_order = rates(schedule(kind, warmup_epochs=2))
    other = schedule(kind, warmup_epochs=2)
    assert [other.lr_at(step) for step in (77, 3, 50, 0)] == [in_order[step] for step in (77, 3, 50, 0)]


def test_changed_horizon_is_told_with_both_ends_and_the_rates_at_the_joint() -> None:
    old, new = schedule("cosine", epochs=2), schedule("cosine", epochs=4)
    line = describe_horizon_change(old, new, 20)
    assert line is not None
    assert "epochs changed from 2 to 4" in line
    assert "step 40 (was 20)" in line
    assert "rate at step 20: 0.5 " in line
    assert "\n" not in line
    assert max(rates(new)) <= 1.0
    assert describe_horizon_change(old, schedule("cosine", epochs=2), 20) is None
