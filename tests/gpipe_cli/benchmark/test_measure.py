"""Medians, spreads and ratios of step times."""

from __future__ import annotations

import pytest
import torch

from gpipe_cli.benchmark.measure import Spread, Stopwatch, ratio, spread
from gpipe_cli.benchmark.subjects import StepFacts, Subject


def test_the_spread_is_quartiles_or_of_few_times_the_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(median_s=2.0, low_s=1.0, high_s=3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(median_s=3.0, low_s=2.0, high_s=4.0)


def test_a_ratio_is_of_the_same_round_so_that_drift_cancels() -> None:
    ours, theirs = [(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)], [(1.5, 1.5), (3.0, 3.0), (6.0, 6.0)]
    assert ratio(ours, theirs) == pytest.approx(1.5)


def test_one_disturbed_round_does_not_move_a_ratio() -> None:
    assert ratio([(1.0,), (1.0,), (9.0,)], [(2.0,), (2.0,), (2.0,)]) == pytest.approx(2.0)


def test_without_a_common_round_there_is_no_ratio() -> None:
    assert ratio([(1.0,)], []) is None


class Counting(Subject):
    """Does nothing, but says that it waited."""

    def __init__(self, wait_s: float | None) -> None:
        self.steps, self._wait_s = 0, wait_s

    def step(self) -> StepFacts:
        self.steps += 1
        return StepFacts(wait_s=self._wait_s, num_bytes_sent=12, num_rematerializations=3)

    def loss(self) -> None: ...

    def use(self, layout: str) -> None: ...

    def tensors(self):
        return iter(())


def test_a_spell_has_a_time_for_each_step_and_the_sum_of_the_waits() -> None:
    subject = Counting(wait_s=0.5)
    spell = Stopwatch(subject, None, torch.device("cpu")).run(4)
    assert (len(spell.step_times_s), subject.steps) == (4, 4)
    assert spell.wait_s == pytest.approx(2.0, abs=0.1)
    assert (spell.num_bytes_sent, spell.num_rematerializations) == (12, 3)
    assert Stopwatch(Counting(wait_s=None), None, torch.device("cpu")).run(2).wait_s is None
