"""A stage costs what its layers do, and what travels to and from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpipe_cli.pipeline.counting import count_network
from gpipe_cli.planning.stages import make_stages, update_s


def stages(layers, balance, hardware, num_samples=2, batch_size=8, width=4):
    network = count_network(layers, torch.empty(1, width, device="meta"))
    return network, make_stages(
        network, balance, num_samples, batch_size, hardware=hardware,
        seconds=lambda layer, samples: (10.0 ** min(layer, 3), samples), bytes_per_parameter=12, kept_values=1,
    )  # fmt: skip


def test_times_and_parameters_add_up_and_the_loss_is_on_the_last_stage(linears, round_hardware):
    _, (first, second) = stages(linears, (2, 6), round_hardware)
    assert first.cost.forward_s == 1 + 10
    assert second.cost.forward_s == 100 + 5 * 1000 + 1000
    assert second.cost.backward_s == 7 * 2
    assert first.num_parameters == 2 * 20
    assert second.parameter_bytes == 6 * 20 * 12
    assert (first.first_name, first.last_name, first.layers) == ("block_0", "block_1", range(2))


def test_boundaries_travel_and_the_first_stage_holds_the_mini_batch(linears, round_hardware):
    _, (first, second) = stages(linears, (2, 6), round_hardware)
    value = 2 * 4 * 4  # samples, width, bytes
    assert first.footprint.output_bytes == second.cost.input_bytes == value
    assert first.cost.transfer_s == round_hardware.transfer_s(value)
    assert (first.footprint.resident_bytes, first.cost.input_bytes) == (8 * 4 * 4, 0)
    assert (second.footprint.resident_bytes, second.cost.transfer_s) == (0, 0)


def test_the_update_moves_weights_gradients_and_kept_values(round_hardware):
    hardware = dataclasses.replace(round_hardware, overhead_s=1.0)
    assert update_s(100, 0, 1, hardware) == 100 * 4 * 5 / 10
    assert update_s(0, 3, 0, hardware) == 3 * 2


def test_more_samples_take_more_memory_but_no_more_parameters(linears, round_hardware):
    _, few = stages(linears, (4, 4), round_hardware, num_samples=1)
    _, many = stages(linears, (4, 4), round_hardware, num_samples=10)
    assert many[0].cost.activation_bytes == 10 * few[0].cost.activation_bytes
    assert many[0].parameter_bytes == few[0].parameter_bytes
    assert many[1].footprint.working_bytes > few[1].footprint.working_bytes


@pytest.mark.parametrize("balance", [(8,), (1,) * 8, (3, 1, 4)])
def test_no_layer_is_lost_in_a_cut(linears, round_hardware, balance):
    network, made = stages(linears, balance, round_hardware)
    assert sum(stage.num_parameters for stage in made) == sum(count.num_parameters for count in network.layers)
