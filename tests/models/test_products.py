"""Products of activations and weights: the same numbers by either library, and which one is taken where."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpipe_cli.models import products
from gpipe_cli.models.products import Linear, product
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """The operations that run, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.arguments[func.overloadpacket.__name__] = args
        return func(*args, **(kwargs or {}))


@pytest.fixture
def capabilities(monkeypatch):
    """Make this CPU another one."""

    def pretend(**found: object) -> None:
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
        products._mkl_lags.cache_clear()

    yield pretend
    monkeypatch.undo()
    products._mkl_lags.cache_clear()


AMD = {"avx512_f": True, "cpu_name": "AMD EPYC"}
# Rows that can be dealt to sixteen images; rows of pictures; too few of either; too little to do.
LARGE, PICTURES, ODD, SMALL = (4, 128, 256), (4, 7, 7, 512), (3, 333, 256), (4, 16, 64)


@pytest.mark.parametrize("shape", [LARGE, PICTURES, ODD, SMALL])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_a_linear_layer_by_either_library(capabilities, shape, bias):
    capabilities(**AMD)
    torch.manual_seed(0)
    layer = Linear(shape[-1], 192, bias=bias)
    input = torch.randn(shape, requires_grad=True)
    leaves = (input, *layer.parameters())
    output, expected = layer(input), F.linear(input, layer.weight, layer.bias)
    gradient = torch.randn_like(expected)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    found, wanted = torch.autograd.grad(output, leaves, gradient), torch.autograd.grad(expected, leaves, gradient)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def operations(input: torch.Tensor) -> dict[str, tuple]:
    with Calls() as calls, torch.no_grad():
        product(input, torch.ones(192, input.shape[-1], dtype=input.dtype))
    return calls.arguments


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", [LARGE, PICTURES])
def test_large_products_go_to_onednn_where_mkl_does_not_use_the_cpus_width(capabilities, shape, num_threads):
    capabilities(**AMD)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        arguments = operations(torch.ones(shape))["convolution"]
        assert torch._C._select_conv_backend(*arguments) == torch._C._ConvBackend.Mkldnn
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [ODD, SMALL])
def test_products_that_onednn_would_not_do_faster_stay_products(capabilities, shape):
    capabilities(**AMD)
    assert "convolution" not in operations(torch.ones(shape))


def test_double_precision_stays_a_product(capabilities):
    capabilities(**AMD)
    assert "convolution" not in operations(torch.ones(LARGE, dtype=torch.float64))


@pytest.mark.parametrize(
    "found", [{"avx512_f": True, "cpu_name": "Intel Xeon Processor"}, {"cpu_name": "AMD EPYC"}, {}]
)
def test_intels_cpus_and_those_without_wide_vectors_keep_mkl(capabilities, found):
    capabilities(**found)
    assert "convolution" not in operations(torch.ones(LARGE))
