"""Sizes of micro-batches: all samples are there, and tapered ones begin and end small."""

from __future__ import annotations

import pytest

from gpipe_cli.pipeline.sizes import relative_sizes, split_sizes


@pytest.mark.parametrize("tapered", [False, True])
def test_every_sample_is_in_a_micro_batch_and_every_micro_batch_has_one(tapered):
    for num_micro_batches in range(1, 20):
        for samples in range(num_micro_batches, 8 * num_micro_batches):
            sizes = split_sizes(samples, num_micro_batches, tapered)
            assert (sum(sizes), len(sizes)) == (samples, num_micro_batches)
            assert min(sizes) >= 1


def test_even_ones_differ_by_one_at_most_and_too_few_samples_leave_some_empty():
    assert split_sizes(11, 4) == (3, 3, 3, 2)
    assert split_sizes(2, 4) == split_sizes(2, 4, tapered=True) == (1, 1, 0, 0)


@pytest.mark.parametrize("num_micro_batches", [3, 4, 5, 8, 16, 32, 61])
def test_tapered_ones_rise_and_fall_and_the_first_and_last_are_less_than_half_of_the_largest(num_micro_batches):
    sizes = split_sizes(1000 * num_micro_batches, num_micro_batches, tapered=True)
    top = sizes.index(max(sizes))
    assert list(sizes[: top + 1]) == sorted(sizes[: top + 1])
    assert list(sizes[top:]) == sorted(sizes[top:], reverse=True)
    assert sizes[0] == pytest.approx(sizes[-1], abs=1)
    assert max(sizes) / 3.05 < sizes[0] < max(sizes) / 2
    relative = relative_sizes(num_micro_batches, tapered=True)
    assert sum(relative) == pytest.approx(num_micro_batches)
    assert [size / 1000 for size in sizes] == pytest.approx(relative, abs=0.002)


def test_few_samples_are_tapered_too():
    assert split_sizes(32, 8, tapered=True) == (2, 4, 6, 6, 5, 4, 3, 2)
    assert split_sizes(9, 8, tapered=True) == (1, 1, 2, 1, 1, 1, 1, 1)


def test_two_micro_batches_have_no_middle():
    assert split_sizes(9, 2, tapered=True) == split_sizes(9, 2) == (5, 4)
