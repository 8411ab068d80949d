"""What a stage holds: every tensor once, however many of its layers keep it or pass it on."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from gpipe_cli.pipeline.counting import count_network
from gpipe_cli.pipeline.footprint import footprints, rank_bytes
from gpipe_cli.pipeline.policies import make_schedule
from gpipe_cli.pipeline.simulate import peak_memory

WIDTH = 4
VALUE = 2 * WIDTH * 4  # bytes of two samples


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


BLOCKS = [(f"block_{index}", partial(block)) for index in range(8)]


class Shift(nn.Module):
    """Adds a parameter: autograd keeps nothing for that."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def stages(layers, balance):
    """Of micro-batches of 2 samples, 4 of them in a mini-batch."""
    return footprints(count_network(layers, torch.empty(1, WIDTH, device="meta")), balance, 2, 8)


def test_the_first_stage_holds_the_mini_batch_the_others_their_inputs():
    first, second = stages(BLOCKS, (2, 6))
    assert first.output_bytes == second.input_bytes == VALUE
    assert (first.resident_bytes, first.input_bytes) == (4 * VALUE, 0)
    assert (second.resident_bytes, second.output_bytes) == (0, 0)


def test_a_chain_keeps_one_output_a_layer():
    """Each Tanh saves its output, which the next Linear saves as its input: the same tensor."""
    first, second = stages(BLOCKS, (3, 5))
    assert (first.activation_bytes, first.saved_bytes) == (3 * VALUE, 3 * VALUE)
    loss = second.activation_bytes - 5 * VALUE
    assert second.saved_bytes == second.activation_bytes + VALUE - 4  # its input as well, not the loss
    assert 0 < loss < 3 * VALUE


def test_an_output_that_autograd_does_not_keep_is_still_held():
    first, _ = stages([("add", Shift), ("end", Shift)], (1, 1))
    assert (first.activation_bytes, first.saved_bytes) == (VALUE, 0)


def test_what_two_stages_of_one_rank_keep_both_counts_once():
    _, second = stages(BLOCKS, (2, 6))
    assert second.shared_bytes == VALUE  # the Tanh before keeps it too
    _, second = stages([("add", Shift), *BLOCKS], (1, 8))
    assert second.shared_bytes == 0  # its first Linear alone
    whole, parts = stages(BLOCKS, (8,)), stages(BLOCKS, (2, 3, 3))
    one = peak_memory(make_schedule(1, 4, "gpipe", "none").operations[0], whole)
    assert peak_memory(make_schedule(3, 4, "gpipe", "none", 1).operations[0], parts)[:2] == one[:2]


def test_a_ranks_memory_has_room_for_its_largest_operation():
    first, second = stages(BLOCKS, (2, 6))
    alone = [rank_bytes([stage], 12, 0) for stage in (first, second)]
    smaller = min(first.working_bytes, second.working_bytes)
    assert rank_bytes([first, second], 12, 100) == sum(alone) - smaller + 100
    assert alone[0] == first.num_parameters * 12 + first.resident_bytes + first.working_bytes
