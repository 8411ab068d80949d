"""Layers built from their factories."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import torch
from torch import nn

from gpipe_cli.pipeline.layers import named_layers


def test_a_layer_without_data_has_the_shapes_of_the_real_one() -> None:
    layers = named_layers(
        [("embedding", partial(nn.Embedding, 7, 3)), ("linear", partial(nn.Linear, 3, 5)), ("norm", nn.Identity)]
    )
    for index, layer in enumerate(layers):
        real, empty = layer.build(index, 0), layer.build_without_data(index)
        shapes = {name: parameter.shape for name, parameter in real.named_parameters()}
        assert {name: parameter.shape for name, parameter in empty.named_parameters()} == shapes
        assert all(parameter.is_meta for parameter in empty.parameters())


def test_a_given_module_keeps_its_values() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.clone()
    [layer] = named_layers([("linear", module)])
    assert layer.build_without_data(0) is module
    assert torch.equal(module.weight, before)


def test_values_are_drawn_where_there_are_some() -> None:
    """A factory may hold a tensor of its own, on a real device."""

    def factory() -> nn.Module:
        module = nn.Linear(2, 2, device="cpu")
        nn.init.normal_(module.weight, mean=100.0)
        return module

    [layer] = named_layers([("linear", factory)])
    assert layer.build_without_data(0).weight.mean() > 90


def test_initial_values_that_nobody_sees_do_not_load_torchs_compiler() -> None:
    code = (
        "import sys; from functools import partial; from torch import nn; "
        "from gpipe_cli.pipeline.layers import named_layers; "
        "[layer] = named_layers([('embedding', partial(nn.Embedding, 7, 3))]); layer.build_without_data(0); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
