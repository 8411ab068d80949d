"""The same training twice, through the pipeline and by plain PyTorch, and how far apart they are.

The plain loop runs micro-batch by micro-batch, because batch norm normalises by the micro-batch; it seeds the
generators by the engine's counters, so that it draws the same; and it computes the running statistics from all that the
batch norms were given, by none of the engine's means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline import Layers, Pipeline
from gpipe_cli.pipeline.layers import build_layers, named_layers
from gpipe_cli.pipeline.randomness import TRAINING, derive_seed, seed_generators

LEARNING_RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network, a mini-batch (tensors on the device) and its loss."""

    layers: Layers
    inputs: Tensor
    targets: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]
    num_micro_batches: int
    seed: int = 7
    max_norm: float | None = None
    num_steps: int = 1

    @property
    def device(self) -> torch.device:
        return self.inputs.device


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of the steps: losses, the last step's gradients, weights, running statistics, evaluation."""

    losses: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    statistics: dict[str, Tensor]
    outputs: Tensor
    norms: Tensor


def train_pipeline(task: Task, pipe: Pipeline) -> Trained:
    """Through the pipeline, which must be made of the task's layers, loss and seed."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for _ in range(task.num_steps):
        optimizer.zero_grad()
        losses.append(pipe.forward_backward(task.inputs, task.targets).loss.double())
        if task.max_norm is not None:
            norms.append(pipe.clip_grad_norm(task.max_norm).double())
        optimizer.step()
    outputs = pipe.evaluate(task.inputs)
    assert isinstance(outputs, Tensor)
    return _trained(pipe.module, losses, norms, outputs)


def train_plain(task: Task) -> Trained:
    """By an ordinary loop over an nn.Sequential."""
    named = named_layers(task.layers)
    built = build_layers(named, range(len(named)), (), task.seed)
    model = nn.Sequential()
    for index, layer in enumerate(named):
        model.add_module(layer.name, built[index].to(task.device))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for step in range(task.num_steps):
        optimizer.zero_grad()
        with _whole_batch_statistics(model):
            losses.append(_accumulate(task, model, step))
        if task.max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), task.max_norm).double())
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return _trained(model, losses, norms, model(task.inputs))


def distance(ours: Mapping[str, Tensor] | Tensor, theirs: Mapping[str, Tensor] | Tensor) -> float:
    """The norm of the difference of all tensors together, relative to the norm of all of `theirs`.

    Of all together, because a tensor of its own may consist of rounding: what stands before a batch norm has weights
    whose gradients nearly cancel.
    """
    if isinstance(ours, Tensor) or isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor)
        assert isinstance(theirs, Tensor)
        ours, theirs = {"": ours}, {"": theirs}
    if ours.keys() != theirs.keys():
        return math.inf
    apart = sum(float((tensor.double() - theirs[name].double()).square().sum()) for name, tensor in ours.items())
    size = sum(float(tensor.double().square().sum()) for tensor in theirs.values())
    return math.sqrt(apart / size) if size else math.inf


def _accumulate(task: Task, model: nn.Sequential, step: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=task.device)
    micro_batches = zip(
        torch.tensor_split(task.inputs, task.num_micro_batches),
        torch.tensor_split(task.targets, task.num_micro_batches),
        strict=True,
    )
    for number, (inputs, targets) in enumerate(micro_batches):
        value: Any = inputs
        for index, module in enumerate(model):
            seed_generators(task.device, derive_seed(TRAINING, task.seed, 0, step, number, index))
            value = module(value)
        loss = task.loss_fn(value, targets)
        share = inputs.shape[0] / task.inputs.shape[0]
        torch.autograd.backward(loss * share)
        total += loss.detach().double() * share
    return total


@contextmanager
def _whole_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Running statistics move once, by the mean and the unbiased variance of all that came in meanwhile."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: dict[nn.Module, list[Tensor]] = {norm: [] for norm in norms}
    before = {norm: {name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms}

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[module].append(args[0].detach())

    handles = [norm.register_forward_pre_hook(note) for norm in norms]
    yield
    for handle in handles:
        handle.remove()
    for norm in norms:
        values = torch.cat(seen[norm]).double()
        moments = {"running_mean": values.mean((0, 2, 3)), "running_var": values.var((0, 2, 3), unbiased=True)}
        for name, buffer in norm.named_buffers():
            old = before[norm][name]
            if name in moments:
                assert norm.momentum is not None
                buffer.copy_(old.double() + norm.momentum * (moments[name] - old.double()))
            else:
                buffer.copy_(old + 1)


def _trained(module: nn.Module, losses: Sequence[Tensor], norms: Sequence[Tensor], outputs: Tensor) -> Trained:
    gradients = {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
    return Trained(
        losses=torch.stack(list(losses)),
        gradients=gradients,
        weights={name: parameter.detach().clone() for name, parameter in module.named_parameters()},
        statistics={name: buffer.clone() for name, buffer in module.named_buffers()},
        outputs=outputs,
        norms=torch.stack(list(norms)) if norms else torch.zeros(0),
    )
