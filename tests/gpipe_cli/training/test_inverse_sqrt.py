from __future__ import annotations

import pytest

from gpipe_cli.training.inverse_sqrt import inverse_sqrt_lr


def test_the_rate_rises_linearly_and_falls_with_the_root_of_the_step() -> None:
    assert [inverse_sqrt_lr(step, 1.0, 4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert inverse_sqrt_lr(15, 1.0, 4) == 0.5
    assert inverse_sqrt_lr(399, 1.0, 4) == pytest.approx(0.1)


def test_the_rate_is_the_published_formula() -> None:
    width, warmup, scale = 2048, 40_000, 0.5
    base = scale / (width * warmup) ** 0.5
    assert base == pytest.approx(5.524e-5, rel=1e-3)
    for step in (0, 100, 39_999, 40_000, 200_000):
        number = step + 1
        published = scale * width**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert inverse_sqrt_lr(step, base, warmup) == pytest.approx(published, rel=1e-12)


def test_without_warm_up_the_first_step_has_the_base_rate() -> None:
    assert inverse_sqrt_lr(0, 0.3, 0) == 0.3
    assert inverse_sqrt_lr(3, 0.3, 0) == 0.15


def test_the_rate_is_never_above_the_base_rate() -> None:
    assert max(inverse_sqrt_lr(step, 0.1, 7) for step in range(1000)) == 0.1
