"""Products of activations with weight matrices, by the library that does them fastest on this CPU.

torch gives products of 32-bit floats to Intel's MKL, which uses only half of the width of AVX-512 on CPUs that are not
Intel's (2024.2 on an AMD EPYC of family 26: 104 of 235 GFLOP/s, on one thread). oneDNN, which does torch's
convolutions, uses all of it everywhere. So there a product is computed as a 1x1 convolution; on Intel's own CPUs MKL is
the faster one.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Below these the calls cost more than the sums.
FEWEST_FLOPS = 8e6
# torch gives a 1x1 convolution on one thread to oneDNN only if it has at least so many images.
FEWEST_IMAGES = 16


def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input` (..., C) times the transposed `weight` (D, C), plus `bias` (D,): (..., D), as F.linear."""
    num_images = _num_images(input, weight)
    if num_images == 0:
        return F.linear(input, weight, bias)
    images = input.reshape(num_images, 1, -1, input.shape[-1]).permute(0, 3, 1, 2)
    output = F.conv2d(images, weight[:, :, None, None], bias)
    return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], weight.shape[0])


class Linear(nn.Linear):
    """nn.Linear, computed by `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


def _num_images(input: Tensor, weight: Tensor) -> int:
    """How many images the rows of `input` are made for a convolution; 0 where F.linear is the better choice."""
    if input.device.type != "cpu" or input.dtype != torch.float32 or not _mkl_lags():
        return 0
    if 2 * input.numel() * weight.shape[0] < FEWEST_FLOPS:
        return 0
    num_rows = input.numel() // input.shape[-1]
    if num_rows % FEWEST_IMAGES == 0:
        return FEWEST_IMAGES
    num_images = num_rows // input.shape[-2] if input.dim() > 1 else 1
    return num_images if num_images >= FEWEST_IMAGES else 0


@functools.cache
def _mkl_lags() -> bool:
    """Whether this CPU has AVX-512 that MKL does not use."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):  # type: ignore[no-untyped-call]
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_f")) and "Intel" not in str(capabilities.get("cpu_name"))
