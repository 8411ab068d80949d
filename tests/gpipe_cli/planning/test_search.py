"""`auto` finds the fastest plan that fits; where none does, the changes named do fit."""

from __future__ import annotations

import pytest

from gpipe_cli.planning.network import make_planner
from gpipe_cli.planning.planner import Choice
from gpipe_cli.planning.search import best, candidates, suggestions

pytestmark = pytest.mark.usefixtures("counted_once")


def test_auto_is_at_least_as_fast_as_every_choice_that_fits(plan_config):
    planner = make_planner(plan_config("accelerators=4"))
    plan = best(planner)
    everything = [planner.evaluate(choice) for choice in candidates(planner)]
    assert {p.choice.partitions for p in everything} == {1, 2, 3, 4}
    assert {p.choice.micro_batches for p in everything} == {1, 2, 4, 8, 16}
    assert plan.fits
    assert plan.samples_per_s == max(p.samples_per_s for p in everything if p.fits)


def test_what_is_given_is_not_searched(plan_config):
    assert {choice.partitions for choice in candidates(make_planner(plan_config("partitions=2")))} == {2}
    assert {choice.micro_batches for choice in candidates(make_planner(plan_config("micro_batches=4")))} == {4}


def test_auto_leaves_out_what_does_not_fit(plan_config):
    roomy = best(make_planner(plan_config("partitions=2", "remat=none")))
    limit = max(roomy.memory_bytes_per_rank) / 1e9 + 0.6 - 1e-4
    tight = best(make_planner(plan_config("partitions=2", "remat=none", f"hardware.memory_gb={limit}")))
    assert tight.fits
    assert tight.choice != roomy.choice
    assert tight.samples_per_s <= roomy.samples_per_s


def test_every_suggestion_fits_and_says_how(plan_config):
    settings = ("partitions=2", "micro_batches=2", "remat=none", "model.filters=64")
    planner = make_planner(plan_config(*settings))
    needed = max(planner.evaluate(planner.first_choice()).memory_bytes_per_rank)
    planner = make_planner(plan_config(*settings, f"hardware.memory_gb={needed / 1e9 * 0.8 + 0.6}"))
    plan = planner.evaluate(planner.first_choice())
    assert not plan.fits
    found = {suggestion.settings: suggestion.plan for suggestion in suggestions(planner, plan)}
    assert all(other.fits for other in found.values())
    assert "remat=full" in found
    assert any(settings.startswith("partitions=") for settings in found)
    assert any("batch_size=" in settings for settings in found)


def test_changes_are_combined_where_none_is_enough(plan_config):
    settings = ("partitions=1", "micro_batches=1", "remat=none", "model.filters=64")
    everything = Choice(partitions=7, micro_batches=16, batch_size=16, remat="full", cut="memory")
    needed = max(make_planner(plan_config(*settings)).evaluate(everything).memory_bytes_per_rank)
    planner = make_planner(plan_config(*settings, f"hardware.memory_gb={needed * 1.01 / 1e9 + 0.6}"))
    (found,) = suggestions(planner, planner.evaluate(planner.first_choice()))
    assert found.settings.startswith("partitions=")
    assert found.settings.endswith(" micro_batches=16 remat=full cut=memory")
    assert found.plan.fits


def test_nothing_is_suggested_where_nothing_helps(plan_config):
    planner = make_planner(plan_config("partitions=1", "micro_batches=1", "hardware.memory_gb=0.6001"))
    plan = planner.evaluate(planner.first_choice())
    assert not plan.fits
    assert suggestions(planner, plan) == []


@pytest.mark.parametrize("most", [1, 8, 9, 100])
def test_partitions_are_tried_up_to_the_most(plan_config, most):
    planner = make_planner(plan_config("micro_batches=1", f"accelerators={most}"))
    tried = [choice.partitions for choice in candidates(planner)]
    assert tried[0] == 1
    assert tried[-1] == min(most, 7)
