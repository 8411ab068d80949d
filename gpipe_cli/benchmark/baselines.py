"""What a pipeline is compared with: the same layers, weights, data, loss and optimizer, by other means.

`single` is an ordinary training loop. `torch` is torch.distributed.pipelining's ScheduleGPipe over the same processes
and the same cut, each stage checkpointed (torch.utils.checkpoint) where ours re-materializes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe_cli.benchmark.subjects import (
    CHANNELS_LAST,
    CONTIGUOUS,
    Ingredients,
    PipelineSubject,
    StepFacts,
    Subject,
    in_layout,
    memory_format,
)
from gpipe_cli.pipeline.layers import build_layers, named_layers


def make_subject(parts: Ingredients) -> Subject:
    """What `parts.case` asks for. Collective where there are several ranks."""
    kinds: dict[str | None, type[Subject]] = {"single": SingleSubject, "torch": TorchSubject}
    subject: Subject = kinds.get(parts.case.baseline, PipelineSubject)(parts)  # type: ignore[call-arg]
    return subject


def _build(parts: Ingredients, indices: Sequence[int]) -> list[tuple[str, nn.Module]]:
    """Layers with the initial weights that our pipeline gives them."""
    named = named_layers(parts.layers)
    built = build_layers(named, indices, (), parts.config.seed)
    return [(named[index].name, built[index].to(parts.device).train()) for index in indices]


def _layouts(parts: Ingredients) -> tuple[str, ...]:
    """Both memory formats, to be tried, unless the user wants one."""
    return (CHANNELS_LAST, CONTIGUOUS) if parts.channels_last else (CONTIGUOUS,)


def _share(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Make the parameters of each group one: the first of them."""
    for first, *others in ties:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


class SingleSubject(Subject):
    """An ordinary loop over an nn.Sequential: whole mini-batches, one process, all cores."""

    def __init__(self, parts: Ingredients) -> None:
        self._parts = parts
        layers = _build(parts, range(len(named_layers(parts.layers))))
        self._model = nn.Sequential()
        for name, module in layers:
            self._model.add_module(name, module)
        _share(self._model, parts.ties)
        self.layouts = _layouts(parts)
        self.balance = (len(layers),)
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.optimizer = parts.optimizer(self._model.named_parameters())
        self._inputs, self._loss = parts.inputs, torch.tensor(0.0)
        self.use(self.layouts[0])

    def use(self, layout: str) -> None:
        self._model.to(memory_format=memory_format(layout))
        self._inputs = in_layout(self._parts.inputs, layout)

    def step(self) -> StepFacts:
        self.optimizer.zero_grad()
        with self._parts.precision():
            loss = self._parts.loss_fn(self._model(self._inputs), self._parts.targets)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self._loss = loss.detach()
        return StepFacts(wait_s=0.0, num_bytes_sent=0, num_rematerializations=0)

    def loss(self) -> float | None:
        return float(self._loss)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()


class TorchSubject(Subject):
    """ScheduleGPipe, one stage a rank.

    It refuses to send channels-last tensors ("input tensor has to be contiguous"), so in that layout each stage turns
    its inputs to channels-last and its outputs back.
    """

    def __init__(self, parts: Ingredients) -> None:
        case = parts.case
        assert case.balance is not None
        self._parts = parts
        self._rank, self._num_stages = (dist.get_rank(), case.partitions) if dist.is_initialized() else (0, 1)
        ends = list(accumulate(case.balance))
        end = ends[self._rank]
        self._stage = _TorchStage(
            _build(parts, range(end - case.balance[self._rank], end)),
            checkpointed=case.remat == "full",
            precision=parts.precision,
        )
        self.layouts = _layouts(parts)
        self.balance = case.balance
        self.num_parameters = _summed(sum(parameter.numel() for parameter in self._stage.parameters()))
        self.optimizer = parts.optimizer(self._stage.named_parameters())
        self._schedule: Any = None
        self._inputs = parts.inputs
        self._losses: list[Tensor] = []
        self.use(self.layouts[0])

    def use(self, layout: str) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        self._stage.to(memory_format=memory_format(layout))
        self._stage.layout = layout
        self._inputs = self._parts.inputs.contiguous()
        stage = PipelineStage(self._stage, self._rank, self._num_stages, self._parts.device)
        self._schedule = ScheduleGPipe(
            stage, n_microbatches=self._parts.case.micro_batches, loss_fn=self._parts.loss_fn
        )

    def step(self) -> StepFacts:
        self.optimizer.zero_grad()
        self._losses = []
        inputs = (self._inputs,) if self._rank == 0 else ()
        if self._rank == self._num_stages - 1:
            self._schedule.step(*inputs, target=self._parts.targets, losses=self._losses)
        else:
            self._schedule.step(*inputs)
        self.optimizer.step()
        return StepFacts()

    def loss(self) -> float | None:
        return float(torch.stack(self._losses).detach().mean()) if self._losses else None

    def tensors(self) -> Iterator[Tensor]:
        yield from self._stage.parameters()
        yield from self._stage.buffers()


class _EnterStage(torch.autograd.Function):
    """An input in the stage's layout; its gradient leaves in the only one that torch's transport takes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: str) -> Tensor:
        del ctx
        inside = in_layout(tensor, layout)
        return inside if inside is not tensor else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0].contiguous(), None


class _TorchStage(nn.Module):
    """Layers that take and give one value, as a module whose tensors are separate arguments."""

    layout = CONTIGUOUS

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], *, checkpointed: bool, precision: Any) -> None:
        super().__init__()
        self._checkpointed, self._precision = checkpointed, precision
        for name, module in layers:
            self.add_module(name, module)

    def forward(self, *tensors: Tensor) -> Any:
        if self._checkpointed:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self._run, *tensors, use_reentrant=False)
        return self._run(*tensors)

    def _run(self, *tensors: Tensor) -> Any:
        inside: tuple[Tensor, ...] = tuple(_EnterStage.apply(tensor, self.layout) for tensor in tensors)
        value: Any = inside if len(inside) > 1 else inside[0]
        precision: AbstractContextManager[Any] = self._precision()
        with precision:
            for module in self.children():
                value = module(value)
        if isinstance(value, Tensor):
            return in_layout(value, CONTIGUOUS)
        return tuple(in_layout(tensor, CONTIGUOUS) for tensor in value)


def _summed(number: int) -> int:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, number)
    return sum(box)
