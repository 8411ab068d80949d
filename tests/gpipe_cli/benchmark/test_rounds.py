"""Measuring in turn: start-up does not count (CASES 79), what each step costs does, and one failure is not the end."""

from __future__ import annotations

from typing import Any

import pytest

from gpipe_cli.benchmark.grid import grid
from gpipe_cli.benchmark.results import Result, by_case, compare
from gpipe_cli.benchmark.rounds import measure_group, steps_of_rounds
from gpipe_cli.benchmark.survey import survey
from gpipe_cli.errors import GpipeError, OutOfMemoryError

NETWORK = """
    import os, time
    from functools import partial
    import torch
    from torch import nn

    class Odd(nn.Module):
        '''Sleeps in its first pass, in each forward or backward pass, or fails, as asked.'''

        def __init__(self, first_s, each_s, back_s, fault):
            super().__init__()
            self.first_s, self.each_s, self.back_s, self.fault = first_s, each_s, back_s, fault
            self.linear = nn.Linear(192, 8)

        def forward(self, value):
            if not value.is_meta:
                time.sleep(self.first_s + self.each_s)
                self.first_s = 0.0
                # Only in a process of the pipeline: two ranks.
                ranks = torch.distributed.is_initialized()
                if self.fault == "memory" and ranks:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\\nmore text")
                if self.fault == "death" and ranks:
                    os._exit(9)
            out = self.linear(value)
            if out.requires_grad and self.back_s:
                out.register_hook(lambda gradient: time.sleep(self.back_s))
            return out

    def layers(num_classes, first_s=0.0, each_s=0.0, back_s=0.0, fault=None):
        return [
            ("flatten", nn.Flatten),
            ("odd", partial(Odd, first_s, each_s, back_s, fault)),
            ("relu", nn.ReLU),
            ("linear", partial(nn.Linear, 8, num_classes)),
        ]
"""
WORDS = ("micro_batches=2", "remat=none", "balance=[3,1]", "partitions=2")


def measured(config: Any, **words: Any) -> list[Result]:
    return measure_group(config, survey(config, grid(config)), "cpu", lambda num_steps: None)


def test_a_slow_first_step_does_not_count(users_config) -> None:
    [result] = measured(users_config(NETWORK, *WORDS, "steps=20", "model.kwargs.first_s=2.0"))
    assert len(result.step_times_s) == 20
    assert max(result.step_times_s) < 1.0
    assert result.samples_per_s * result.spread.median_s == pytest.approx(8)


def test_what_every_step_costs_counts_in_each(users_config) -> None:
    [result] = measured(users_config(NETWORK, *WORDS, "steps=4", "model.kwargs.each_s=0.05"))
    assert min(result.step_times_s) >= 2 * 0.05  # in each micro-batch
    # The second rank has nothing to do meanwhile, and says so; the first one sleeps at work.
    first, second = result.bubble_per_rank
    assert second > 0.5 > first


def test_a_rank_that_is_done_early_waits_for_the_others(users_config) -> None:
    [result] = measured(users_config(NETWORK, *WORDS, "steps=4", "model.kwargs.back_s=0.05"))
    first, second = result.bubble_per_rank
    assert second > 0.5 > first


def test_rows_of_a_group_are_measured_in_as_many_rounds_with_their_ratio(users_config) -> None:
    config = users_config(NETWORK, "micro_batches=2", "remat=none", "partitions=[1,2]", "model.kwargs.each_s=0.02")
    one, two = results = measured(config)
    assert [len(spells) for spells in (one.spells, two.spells)] == [2, 2]
    comparison = compare(two, by_case(results))
    assert comparison.over == "K=1 M=2"
    assert 0.3 < comparison.speedup < 1.5  # both sleep alike
    assert compare(one, by_case(results)).speedup == 1.0
    assert two.num_bytes_sent_per_rank[0] == 8 * 8 * 4  # a batch of eight values of four bytes


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("memory", OutOfMemoryError, "out of memory on cpu: CUDA out of memory. Tried to allocate 9 GiB"),
        ("death", GpipeError, "rank 0: ended with exit code 9"),
    ],
)
def test_a_failed_row_says_why_and_the_rest_goes_on(users_config, capfd, fault: str, error: type, text: str) -> None:
    config = users_config(NETWORK, "micro_batches=2", "remat=none", "partitions=[2,1]", f"model.kwargs.fault={fault}")
    failed, good = measured(config)
    assert isinstance(failed.error, error)
    assert str(failed.error).startswith(text)
    assert good.error is None
    assert len(good.step_times_s) == 2
    assert "Traceback" not in capfd.readouterr().err


def test_a_trace_and_memory_come_with_the_end(users_config) -> None:
    [result] = measured(users_config(NETWORK, *WORDS, "trace=true"))
    assert [len(events) for events in result.end.events] == [4, 4]  # two micro-batches, forward and backward
    starts = [events[0].start_s for events in result.end.events]
    assert starts[0] < starts[1] < starts[0] + 60  # one clock for both processes
    assert all(count > 0 for count in result.end.activation_bytes)
    # Weights, gradients, and RMSProp's two averages; its counters are a few bytes more.
    num_parameters = (192 * 8 + 8) + (8 * 4 + 4)
    assert result.end.parameter_memory_bytes == pytest.approx(4 * 4 * num_parameters, rel=0.01)


def test_steps_are_shared_out_evenly() -> None:
    assert steps_of_rounds(7, 3) == [3, 2, 2]
