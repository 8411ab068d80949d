"""Where a check works: the device, the sizes, the time that is left; and how it gets something to train there."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe_cli.benchmark.baselines import make_subject
from gpipe_cli.benchmark.grid import SINGLE, Case, baseline_of, grid
from gpipe_cli.benchmark.subjects import Ingredients, Subject, gather_ingredients
from gpipe_cli.compose import load
from gpipe_cli.distributed.launch import RankContext
from gpipe_cli.gpu_check.record import CheckFailed
from gpipe_cli.gpu_check.sizes import Sizes
from gpipe_cli.pipeline.layers import LayerFactory, named_layers

# What cuBLAS and cuDNN say when their workspace does not fit: no torch.OutOfMemoryError.
_LIBRARIES_OUT_OF_MEMORY = ("ALLOC_FAILED", "unable to find an engine to execute")


@dataclass
class Place:
    """Where the checks of one part work; `deadline` is by time.monotonic. `kept`: what one leaves for the next."""

    device: torch.device
    sizes: Sizes
    deadline: float
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def ingredients(
    place: Place, words: Sequence[str], *, plain: bool = False, balance: tuple[int, ...] | None = None
) -> Ingredients:
    """Layers, data and loss of what `gpipe bench` would measure with these settings, which must name a single row."""
    config = load("bench", [*words, f"device={place.device.type}"])
    [case] = grid(config)
    case = replace(case, balance=balance)
    if plain:
        plain_case = baseline_of(case, SINGLE)
        assert isinstance(plain_case, Case)
        case = plain_case
    context = RankContext(rank=0, world_size=1, local_rank=0, device=str(place.device), num_threads=1)
    return gather_ingredients(config, case, context, None)


def make(
    place: Place,
    words: Sequence[str],
    *,
    plain: bool = False,
    balance: tuple[int, ...] | None = None,
    compile_backend: str | None = None,
) -> Subject:
    """What trains as `gpipe bench` with these settings would, in this process, its weights drawn on the device.

    `plain`: an ordinary loop over the same layers. `compile_backend`: every layer goes through torch.compile.
    """
    parts = ingredients(place, words, plain=plain, balance=balance)
    if compile_backend is not None:
        named = named_layers(parts.layers)
        factories = [(layer.name, partial(_compiled, layer.source, compile_backend)) for layer in named]
        parts = replace(parts, layers=factories)
    # Drawing 300 million weights takes a CPU longer than the steps that are measured.
    with torch.device(place.device):
        return make_subject(parts)


def _compiled(factory: LayerFactory, backend: str) -> nn.Module:
    module = factory()
    module.compile(backend=backend)
    return module


def check_loss(subject: Subject) -> float:
    """The loss of the last step. Raises CheckFailed when it is not finite."""
    loss = subject.loss()
    if loss is None or not math.isfinite(loss):
        raise CheckFailed(f"the loss is {loss}")
    return loss


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory was too small, in torch's words or in those of the libraries below."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LIBRARIES_OUT_OF_MEMORY)


def release(device: torch.device) -> None:
    """Give back all memory that nobody uses any more, and measure its peak anew.

    To be called outside of an `except` block: there the exception's traceback still holds the tensors.
    """
    gc.collect()  # a pipeline's hooks and autograd's graphs form cycles
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on the GPU; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def strict_numerics() -> Iterator[None]:
    """Products in full precision, and of cuDNN's algorithms only those that give the same result every time.

    Otherwise convolutions in float32 use TF32, with ten bits of mantissa, and results depend on what was fastest.
    """
    cudnn: Any = torch.backends.cudnn
    products = (cudnn.conv, torch.backends.cuda.matmul)
    before = (cudnn.deterministic, cudnn.benchmark, *(product.fp32_precision for product in products))
    cudnn.deterministic, cudnn.benchmark = True, False
    for product in products:
        product.fp32_precision = "ieee"
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, *precisions = before
        for product, precision in zip(products, precisions, strict=True):
            product.fp32_precision = precision


def convolution_precision(device: torch.device) -> str:
    """What float32 convolutions compute in: "tf32" where the GPU has it and nobody has switched it off, or "ieee"."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:  # Ampere was the first with TF32
        return "ieee"
    cudnn: Any = torch.backends.cudnn
    return str(cudnn.conv.fp32_precision)
