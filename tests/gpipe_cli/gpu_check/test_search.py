"""The search finds what trying everything would find, in far fewer trials."""

from __future__ import annotations

import pytest

from gpipe_cli.gpu_check.search import Found, largest_that_fits


@pytest.mark.parametrize("num_candidates", [1, 2, 7, 16])
def test_finds_the_border_wherever_it_lies_and_the_search_starts(num_candidates: int) -> None:
    for border in range(num_candidates + 1):  # so many fit
        for start in range(num_candidates):
            tried: list[int] = []

            def fits(candidate: int, tried: list[int] = tried, border: int = border) -> bool:
                tried.append(candidate)
                return candidate < border

            found = largest_that_fits(range(num_candidates), start, fits)
            assert found == Found(border - 1, border)
            assert found.is_complete
            assert len(tried) == len(set(tried))


def test_needs_few_trials_among_many_candidates() -> None:
    tried: list[int] = []

    def fits(candidate: int) -> bool:
        tried.append(candidate)
        return candidate <= 21

    assert largest_that_fits(range(64), 25, fits).fits == 21
    assert len(tried) <= 6


def test_ends_early_with_what_is_known() -> None:
    answers = iter([True, True, None])
    found = largest_that_fits(range(16), 3, lambda _: next(answers))
    assert found == Found(4, 16)
    assert not found.is_complete
