"""The cut: exact, contiguous, complete."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from gpipe_cli.pipeline import cut
from gpipe_cli.pipeline.partition import layer_ranges


def best_by_trying_everything(costs: list[float], partitions: int, weights: list[float]) -> float:
    return min(
        max(w * sum(costs[a:b]) for w, (a, b) in zip(weights, itertools.pairwise((0, *cuts, len(costs))), strict=True))
        for cuts in itertools.combinations(range(1, len(costs)), partitions - 1)
    )


def largest(costs: list[float], balance: tuple[int, ...], weights: list[float]) -> float:
    return max(w * sum(costs[r.start : r.stop]) for w, r in zip(weights, layer_ranges(balance), strict=True))


def test_no_cut_has_a_smaller_largest_partition():
    generator = random.Random(0)
    for _ in range(200):
        costs = [generator.choice([0, 1, 2, 5, generator.random() * 9]) for _ in range(generator.randint(1, 9))]
        for partitions in range(1, len(costs) + 1):
            for weights in ([1.0] * partitions, [generator.choice([1.0, 4 / 3, 0.5]) for _ in range(partitions)]):
                best = best_by_trying_everything(costs, partitions, weights)
                assert largest(costs, cut(costs, partitions, weights), weights) == pytest.approx(best)


def test_every_layer_belongs_to_exactly_one_partition_and_none_is_empty():
    for layers in range(1, 31):
        for partitions in range(1, layers + 1):
            balance = cut([1.0] * layers, partitions)
            assert len(balance) == partitions
            assert min(balance) >= 1
            assert [i for r in layer_ranges(balance) for i in r] == list(range(layers))
    assert sum(cut([1.0] * 10, 3)) == 10
    assert sum(cut([1.0] * 30, 4)) == 30


def test_later_layers_are_not_taken_for_heavier_than_they_are():
    assert cut([6, 5, 4, 3, 2, 1], 2) == (2, 4)


def test_a_network_of_the_papers_largest_size_is_cut_in_under_two_seconds():
    costs = [50.0, *[7.0] * 1661, 90.0]
    began = time.perf_counter()
    balance = cut(costs, 128)
    assert time.perf_counter() - began < 2.0
    assert sum(balance) == 1663


@pytest.mark.parametrize("costs", [[1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_costs_that_are_no_costs_are_refused(costs):
    with pytest.raises(ValueError, match="costs must be finite and not negative"):
        cut(costs, 2)


@pytest.mark.parametrize("partitions", [0, 3])
def test_more_partitions_than_layers_are_refused(partitions):
    with pytest.raises(ValueError, match=f"num_partitions={partitions}: 2 layers can be cut into 1 to 2 partitions"):
        cut([1.0, 1.0], partitions)


def test_unequal_weights_on_many_partitions_are_cut_as_well():
    """Partitions of other weights are not where the bound of equal ones says they are."""
    costs = [float(1 + index % 5) for index in range(300)]
    weights = [1.0 if number % 3 else 4 / 3 for number in range(40)]
    balance = cut(costs, 40, weights)
    assert sum(balance) == 300
    assert min(balance) >= 1
    even = sum(costs) / sum(1 / weight for weight in weights)
    assert even <= largest(costs, balance, weights) < even + 5 * 4 / 3
