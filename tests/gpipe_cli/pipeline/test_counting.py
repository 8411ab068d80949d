"""Counted operations, bytes and activations are those of the real layers; equal layers are counted once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from gpipe_cli.models.amoebanet.network import amoebanet
from torch import nn

from gpipe_cli.pipeline.counting import count_network
from gpipe_cli.pipeline.memory import ActivationMeter
from gpipe_cli.pipeline.profile import count_costs
from gpipe_cli.pipeline.recording import SAMPLES, Amount

PICTURE = torch.empty(1, 3, 32, 32, device="meta")


def flops(work, num_samples=1) -> float:
    return sum(item.flops.at(num_samples) for item in work)


def moved(work, num_samples=1) -> float:
    return sum(item.moved_bytes.at(num_samples) for item in work)


@pytest.mark.parametrize("num_samples", [1, 2, 7])
def test_one_count_serves_every_size_of_micro_batch(num_samples):
    """What the engine counts for each size by running the layers at that size."""
    layers = amoebanet(num_layers=3, num_filters=8, num_classes=10, stem="small")
    counted = count_network(layers, PICTURE)
    for ours, engine in zip(counted.layers, count_costs(layers, PICTURE.expand(num_samples, -1, -1, -1)), strict=True):
        assert ours.num_parameters == engine.num_parameters
        assert flops(ours.forward, num_samples) == engine.num_flops
        assert moved(ours.forward, num_samples) == pytest.approx(engine.num_bytes_moved)
        assert len(ours.forward) == engine.num_operations
        assert sum(output.num_bytes.at(num_samples) for output in ours.outputs) == engine.num_bytes_out


def test_a_linear_layer_computes_and_keeps_what_one_can_work_out():
    layers = [("stretch", partial(nn.Linear, 3, 5, bias=False)), ("tanh", nn.Tanh)]
    linear, tanh = count_network(layers, torch.empty(1, 3, device="meta")).layers
    assert flops(linear.forward) == 2 * 3 * 5
    assert flops(linear.backward) == 2 * 3 * 5  # the weight's gradient; the network's input needs none
    assert (linear.num_parameters, linear.num_parameter_tensors) == (15, 1)
    assert linear.saved_inputs == (True,)
    assert linear.saved_inside == Amount(0, 0)
    assert tanh.outputs[0].saved
    assert tanh.outputs[0].num_bytes == Amount(0, 5 * 4)


def test_a_layer_after_the_first_also_computes_its_inputs_gradient():
    layers = [(f"linear_{index}", partial(nn.Linear, 4, 4, bias=False)) for index in range(2)]
    first, second = count_network(layers, torch.empty(1, 4, device="meta")).layers
    assert flops(second.backward) == 2 * flops(first.backward)


def test_equal_layers_are_built_and_run_once():
    built = []

    class Counted(nn.Linear):
        def __init__(self, width: int) -> None:
            built.append(width)
            super().__init__(width, width)

    layers = [(f"linear_{index}", partial(Counted, 4)) for index in range(100)]
    counted = count_network(layers, torch.empty(1, 4, device="meta"))
    assert len(built) == 2  # the first one's input needs no gradient
    assert len({id(count) for count in counted.layers}) == 2


def test_factories_with_other_arguments_are_other_layers():
    layers = [("a", partial(nn.Linear, 4, 8)), ("b", partial(nn.Linear, 8, 4)), ("c", partial(nn.Linear, 4, 8))]
    counted = count_network(layers, torch.empty(1, 4, device="meta"))
    assert [count.num_parameters for count in counted.layers] == [40, 36, 40]


def test_nothing_is_allocated_and_random_states_stay():
    layers = [("huge", partial(nn.Linear, 10**6, 10**6)), ("small", partial(nn.Linear, 10**6, 1))]
    state = torch.get_rng_state()
    counted = count_network(layers, torch.empty(1, 10**6, device="meta"))
    assert counted.layers[0].num_parameters == 10**12 + 10**6  # four terabytes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_exists_keeps_its_weights_and_gradients():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    count_network(module, torch.empty(1, 4, device="meta"))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_tensor_that_passes_through_is_the_same_tensor():
    class Pass(nn.Module):
        def forward(self, x):
            return (x, torch.tanh(x)) if isinstance(x, torch.Tensor) else (x[0], torch.tanh(x[1]))

    counted = count_network([("a", Pass), ("b", Pass)], torch.empty(1, 4, device="meta"))
    assert [output.alias for output in counted.layers[1].outputs] == [0, None]


def test_the_loss_counts_the_logits_it_keeps():
    counted = count_network([("logits", partial(nn.Linear, 4, 1000))], torch.empty(1, 4, device="meta"))
    assert counted.loss.saved_inside.per_sample == pytest.approx(4000, rel=0.01)  # log-probabilities and labels


def test_half_precision_halves_activations_but_not_weights_and_indices():
    layers = [("conv", partial(nn.Conv2d, 3, 8, 3)), ("pool", partial(nn.MaxPool2d, 2))]
    full = count_network(layers, PICTURE)
    half = count_network(layers, PICTURE, activation_width=0.5)
    assert half.layers[0].outputs[0].num_bytes.per_sample == full.layers[0].outputs[0].num_bytes.per_sample / 2
    assert half.layers[1].saved_inside == full.layers[1].saved_inside  # int64 indices
    assert half.layers[0].forward[0].moved_bytes.fixed == full.layers[0].forward[0].moved_bytes.fixed


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, x):
        heads = (x * self.weight).view(x.shape[0], x.shape[1], 1, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout, is_causal=True)


def attention_bytes(length: int, **settings) -> float:
    layers = [("attention", partial(Attention, settings.pop("dropout", 0.0)))]
    counted = count_network(layers, torch.empty(1, length, 4, device="meta"), **settings)
    return counted.layers[0].saved_inside.per_sample


def test_fused_attention_keeps_no_square_of_the_length():
    assert attention_bytes(64) == pytest.approx(2 * attention_bytes(32))
    assert attention_bytes(64, dropout=0.1) == attention_bytes(64)


def test_attention_with_dropout_on_a_cpu_keeps_the_square_of_the_length():
    assert attention_bytes(64, dropout=0.1, fused_attention=False) > 3 * attention_bytes(
        32, dropout=0.1, fused_attention=False
    )
    assert attention_bytes(64, fused_attention=False) == attention_bytes(64)


def test_attention_counts_both_products():
    counted = count_network([("attention", Attention)], torch.empty(1, 8, 4, device="meta"))
    assert flops(counted.layers[0].forward) == 2 * (2 * 8 * 8 * 4)


def test_counted_activations_are_what_a_meter_finds_in_the_real_layer():
    layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    (counted,) = count_network([("layer", lambda: layer)], PICTURE).layers
    pictures = torch.randn(5, 3, 32, 32)
    with ActivationMeter(excluded=[*layer.parameters(), *layer.buffers()]) as meter:
        layer(pictures)
    assert counted.saved_inside.at(5) + pictures.nbytes == pytest.approx(meter.peak_bytes, rel=1e-3)


def test_the_number_of_samples_divides_no_usual_width():
    assert SAMPLES % 2
    assert all(SAMPLES % divisor for divisor in range(3, SAMPLES))
