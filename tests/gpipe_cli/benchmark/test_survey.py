"""What can be measured here, and where it is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from gpipe_cli.benchmark import survey as module
from gpipe_cli.benchmark.data import sample
from gpipe_cli.benchmark.grid import Case, Impossible, grid
from gpipe_cli.benchmark.suites import suite_cases
from gpipe_cli.benchmark.survey import rank_plan, survey
from gpipe_cli.compose import load
from gpipe_cli.config_bench import BenchConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline import Pipeline
from gpipe_cli.pipeline.profile import count_costs
from gpipe_cli.training.networks import build_network


def engines_cut(settings: BenchConfig, remat: str) -> list[int]:
    """Runs in every rank: where the engine itself cuts."""
    [case] = grid(settings)
    layers = build_network(case.model, case.num_classes, case.image_size, 0)
    costs = [cost.work for cost in count_costs(layers, sample(case, 2))]
    pipe = Pipeline(layers, 2, 4, loss_fn=nn.functional.cross_entropy, remat=remat, costs=costs)
    return list(pipe.balance)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_the_cut_is_the_one_that_the_engine_makes(config, run_ranks, remat: str) -> None:
    settings = config("partitions=2", "micro_batches=4", f"remat={remat}", "cut=flops")
    [case] = survey(settings, grid(settings))
    assert list(case.balance) == run_ranks(2, engines_cut, settings, remat)[0]


def test_without_a_word_the_cut_is_by_the_times_of_the_layers_here(config, monkeypatch) -> None:
    settings = config("partitions=2", "micro_batches=[2,4]", "remat=none")
    measured = []

    def measure_layers(layers, inputs, device):
        measured.append(tuple(inputs.shape))
        return [1.0, 1.0, 1.0, 1.0, 1.0, 5.0] if len(inputs) == 4 else [5.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    monkeypatch.setattr("gpipe_cli.pipeline.profile.measure_layers", measure_layers)
    found = survey(settings, [*grid(settings), *(replace(case, baseline="torch") for case in grid(settings))])
    assert [case.balance for case in found] == [(5, 1), (1, 5)] * 2
    assert [shape[0] for shape in measured] == [4, 2]  # each size of micro-batch once


def test_a_given_cut_is_taken_and_a_wrong_one_refused(config) -> None:
    settings = config("partitions=[1,2]", "micro_batches=2", "remat=none", "balance=[2,4]")
    assert [case.balance for case in survey(settings, grid(settings))] == [(6,), (2, 4)]
    wrong = config("partitions=2", "micro_batches=2", "remat=none", "balance=[2,2]")
    with pytest.raises(ConfigError, match=r"balance=\[2,2\]: sums to 4, the network has 6 layers"):
        survey(wrong, grid(wrong))


def test_impossible_rows_say_why_and_the_others_stay(config) -> None:
    settings = config("partitions=[2,9]", "micro_batches=[2,16]", "remat=none")
    found = survey(settings, grid(settings))
    assert [type(row) for row in found] == [Case, Impossible, Impossible, Impossible]
    assert str(found[1]) == "K=9 M=2 remat=none: the network has only 6 layers to cut into partitions"
    assert "only batch_size=8 samples" in found[2].reason


def test_a_table_of_the_paper_needs_an_accelerator_a_partition(monkeypatch) -> None:
    settings = load("bench", ["suite=table2", "micro_batches=4"])
    monkeypatch.setattr(module, "count_gpus", lambda: 0)
    found = survey(settings, suite_cases(settings))
    assert [row.reason for row in found] == [
        f"needs {number} GPUs, none was found (device=cpu measures on the cores instead)" for number in (2, 4, 8)
    ]


def test_a_row_that_memory_is_too_small_for_is_not_tried(config, monkeypatch) -> None:
    settings = config("partitions=1", "micro_batches=[1,8]", "remat=full")
    whole, parts = grid(settings)
    network = module._Networks(settings).of(whole)
    needed = 16 * network.num_parameters + network.activation_bytes(whole, 8)
    monkeypatch.setattr(module, "_free_bytes", lambda: needed)
    refused, fitting = survey(settings, [whole, parts])
    assert "of memory" in refused.reason
    assert isinstance(fitting, Case)


def test_the_plain_loop_has_all_cores_and_others_the_threads_asked_for(config) -> None:
    settings = config("partitions=2", "micro_batches=2", "remat=none")
    [case] = grid(settings)
    assert rank_plan(settings, case).num_threads == 1
    single = replace(case, baseline="single", partitions=1)
    assert rank_plan(settings, single).num_threads == module.available_cores()
    assert rank_plan(settings, case).num_ranks == 2


def test_text_is_surveyed_like_pictures(text_config) -> None:
    settings = text_config("partitions=[1,2]", "micro_batches=[2,16]", "remat=none", "cut=flops")
    found = survey(settings, grid(settings))
    assert [case.balance for case in found if isinstance(case, Case)] == [(5,), (2, 3)]
    assert [type(row) for row in found] == [Case, Case, Impossible, Impossible]


def test_long_sequences_need_no_quadratic_memory_on_a_cpu(text_config) -> None:
    def needed(length: int) -> int:
        [case] = grid(text_config(f"model.seq_len={length}", "partitions=1", "micro_batches=1", "remat=none"))
        settings = text_config()
        return module._Networks(settings).of(case).activation_bytes(case, 1)

    assert needed(512) < 2.2 * needed(256)
