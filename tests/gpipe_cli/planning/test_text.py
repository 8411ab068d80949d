"""What a plan says on the screen."""

from __future__ import annotations

import pytest

from gpipe_cli.compose import load
from gpipe_cli.planning.network import make_planner
from gpipe_cli.planning.search import suggestions
from gpipe_cli.planning.text import aligned, describe, suggest

pytestmark = pytest.mark.usefixtures("counted_once")


def text_of(config) -> str:
    planner = make_planner(config)
    plan = planner.evaluate(planner.first_choice())
    return "\n".join(describe(config, plan, planner.bytes_per_parameter) + suggest(plan, suggestions(planner, plan)))


def test_every_stage_and_every_figure_is_there(plan_config):
    text = text_of(plan_config("partitions=3", "micro_batches=4"))
    assert "SIMULATED for 3 accelerators of hardware=p40" in text
    assert "16 bytes a parameter (weight 4, gradient 4, and what rmsproptf keeps)" in text
    for word in ("parameters", "full GB", "except_last", "none", "forward ms", "recompute", "backward", "transfer",
                 "update", "balance=[", "samples/s", "bubble", "fits"):  # fmt: skip
        assert word in text
    assert [line.split(":")[0] for line in text.splitlines() if line[:2] in ("0:", "1:", "2:")] == ["0", "1", "2"]


def test_what_does_not_fit_says_so_and_what_to_change(plan_config):
    text = text_of(plan_config("partitions=2", "micro_batches=1", "remat=none", "hardware.memory_gb=0.6005"))
    assert "DOES NOT FIT" in text
    assert "it would fit with" in text or "nothing found that fits" in text


def test_long_tables_show_both_ends(plan_config):
    config = plan_config("model.layers=40", "partitions=40", "micro_batches=1")
    text = text_of(config)
    assert "... 16 more stages between ..." in text
    assert "\n0: stem" in text
    assert "classifier" in text


def test_columns_are_aligned():
    rows = aligned(["name", "n"], [["a", "10"], ["long name", "7"]])
    assert rows == ["name        n", "a          10", "long name   7"]


def test_the_papers_own_memory_stands_beside_a_column_of_its_table(plan_config):
    words = ("model=transformer_786m", "hardware=tpu_v3", "micro_batches=1", "batch_size=1")
    config = load("plan", [*words, "partitions=1"])
    text = text_of(config)
    assert "transformer of 13 blocks: 785,659,136 parameters" in text
    assert "16 bytes a parameter (weight 4, gradient 4, and what adam keeps)" in text
    assert "Table 1, Pipeline-1: 8.8 GiB parameters, 6.4 GiB activations" in text
    assert "at its 12 bytes a parameter ours would be 8.7804 GiB" in text
    assert "the paper" not in text_of(load("plan", [*words, "partitions=2"]))
    assert "the paper" not in text_of(plan_config("partitions=2", "micro_batches=4"))
