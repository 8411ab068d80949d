from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpipe_cli.pipeline import Pipeline
from gpipe_cli.pipeline.memory import ActivationMeter
from gpipe_cli.training.language_loss import build_language_loss


def case(dtype: torch.dtype = torch.float64, vocab_size: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(3, 5, vocab_size, generator=generator, dtype=torch.float64)).to(dtype)
    return logits.requires_grad_(), torch.randint(vocab_size, (3, 5), generator=generator)


class PeakBytes(TorchDispatchMode):
    """Bytes of all tensors that operations have made and that are still there, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in old | self.known:
                    self.known.add(storage._cdata)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        return out

    def _release(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.live -= num_bytes


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk_elements", [1, 13 * 4, 10**6])
def test_loss_and_gradient_are_those_of_torchs_cross_entropy(smoothing: float, chunk_elements: int) -> None:
    logits, targets = case()
    loss = build_language_loss(smoothing, chunk_elements)(logits, targets)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-13)
    found = torch.autograd.grad(2.5 * loss, logits)[0]
    torch.testing.assert_close(found, torch.autograd.grad(2.5 * expected, logits)[0], rtol=0, atol=1e-15)


def test_gradient_is_that_of_finite_differences() -> None:
    logits, targets = case()
    assert torch.autograd.gradcheck(lambda x: build_language_loss(0.2, 40)(x, targets), (logits,))


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, 0.0, -1e4]]], requires_grad=True)
    loss = build_language_loss()(logits, torch.tensor([[1]]))
    assert float(loss.detach()) == 1e4
    assert torch.autograd.grad(loss, logits)[0].tolist() == [[[1.0, -1.0, 0.0]]]


def test_half_precision_logits_are_summed_in_float32_and_get_gradients_of_their_type() -> None:
    logits, targets = case(torch.bfloat16, vocab_size=4000)
    loss = build_language_loss()(logits, targets)
    wide = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(wide.flatten(0, 1), targets.flatten())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, logits)[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), torch.autograd.grad(expected, wide)[0], rtol=1e-2, atol=1e-6)


def test_micro_batches_of_unequal_size_give_the_mean_over_all_tokens() -> None:
    logits, targets = case()
    network = torch.nn.Sequential(torch.nn.Linear(13, 13).double())
    whole = F.cross_entropy(network(logits.detach()).flatten(0, 1), targets.flatten())
    pipe = Pipeline(network, 1, 2, loss_fn=build_language_loss())
    result = pipe.forward_backward(logits.detach(), targets)
    assert float(result.loss) == pytest.approx(float(whole.detach()), abs=1e-13)


@pytest.mark.parametrize(
    ("dtype", "times_logits", "times_logits_in_torch"), [(torch.float32, 2, 3), (torch.bfloat16, 2, 6)]
)
def test_peak_memory_is_the_logits_and_their_gradient(
    dtype: torch.dtype, times_logits: int, times_logits_in_torch: int
) -> None:
    vocab_size, num_tokens = 1000, 512
    targets = torch.randint(vocab_size, (4, num_tokens // 4))

    def torchs(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def peak(loss_fn: Any) -> float:
        vectors = torch.zeros(4, num_tokens // 4, vocab_size, dtype=dtype, requires_grad=True)
        with PeakBytes() as bytes_held:
            loss_fn(vectors * 1.0, targets).backward()
        return bytes_held.peak / vectors.nbytes

    chunked = build_language_loss(chunk_elements=16 * vocab_size)
    assert peak(chunked) == pytest.approx(times_logits, abs=0.3)
    assert peak(torchs) >= times_logits_in_torch - 0.1


def test_only_the_logits_and_a_number_per_token_are_kept_for_the_backward_pass() -> None:
    logits, targets = case(torch.float32)
    with ActivationMeter() as meter:
        loss = build_language_loss()(logits * 1.0, targets)
    assert meter.peak_bytes == logits.nbytes + targets.nbytes + 4 * targets.numel()
    del loss
