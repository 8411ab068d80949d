"""What is measured: something that makes optimizer steps. Ours is here, what it is compared with in `baselines`.

A step is what a training loop does for a mini-batch that is already there: clear the gradients, forward and backward
through all layers, update the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpipe_cli.benchmark.data import mini_batch
from gpipe_cli.distributed.heap import keep_freed_memory
from gpipe_cli.pipeline import Pipeline
from gpipe_cli.pipeline.schedule import Event, num_not_recomputed
from gpipe_cli.training.language_loss import build_language_loss
from gpipe_cli.training.losses import build_loss
from gpipe_cli.training.networks import build_network, tied_parameters
from gpipe_cli.training.optimizer import build_optimizer

if TYPE_CHECKING:
    from gpipe_cli.benchmark.grid import Case
    from gpipe_cli.config_bench import BenchConfig
    from gpipe_cli.distributed.launch import RankContext
    from gpipe_cli.pipeline import Layers, ProcessGroups

CHANNELS_LAST, CONTIGUOUS = "channels-last", "nchw"


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What this rank did in a step; None where it is not known."""

    wait_s: float | None = None
    num_bytes_sent: int | None = None
    num_rematerializations: int | None = None
    events: Sequence[Event] = field(default=())


class Subject(ABC):
    """A way to train the network of a `Case` on one mini-batch. `layouts` are the memory formats that it can work in;
    it starts in the first. `balance` is its cut."""

    layouts: tuple[str, ...] = (CONTIGUOUS,)
    balance: tuple[int, ...]
    kept: tuple[int, ...] | None = None  # with remat=auto, the micro-batches that each stage need not recompute
    num_parameters: int
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self) -> StepFacts:
        """One optimizer step."""

    @abstractmethod
    def loss(self) -> float | None:
        """Mean loss of the last step's mini-batch, before the update; None on ranks that do not know it."""

    @abstractmethod
    def use(self, layout: str) -> None:
        """Work in one of the `layouts` from now on."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """This rank's parameters and buffers: what is no activation."""


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What every subject of a configuration is made of, so that all do the same work."""

    config: BenchConfig
    case: Case
    layers: Layers
    inputs: Tensor
    targets: Tensor
    loss_fn: Callable[[Any, Any], Tensor]
    device: torch.device
    groups: ProcessGroups | None
    ties: Sequence[Sequence[str]] = ()  # full names of parameters that are one and the same

    def optimizer(self, named_parameters: Iterator[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """The configured optimizer."""
        return build_optimizer(named_parameters, self.config.optimizer)

    @property
    def channels_last(self) -> bool:
        """Whether the tensors have a memory format to choose; those of text have none."""
        return self.config.channels_last and self.case.seq_len is None

    def precision(self) -> AbstractContextManager[Any]:
        """The configured automatic mixed precision."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def gather_ingredients(
    config: BenchConfig, case: Case, context: RankContext, groups: ProcessGroups | None
) -> Ingredients:
    """Network, data and loss of a configuration, on this rank."""
    device = torch.device(context.device)
    inputs, targets = mini_batch(case)
    return Ingredients(
        config=config,
        case=case,
        layers=build_network(case.model, case.num_classes, case.image_size, config.seed),
        inputs=inputs.to(device),
        targets=targets.to(device),
        loss_fn=build_loss(0.0, case.model.aux_weight) if case.seq_len is None else build_language_loss(),
        device=device,
        groups=groups,
        ties=tied_parameters(case.model),
    )


def memory_format(layout: str) -> torch.memory_format:
    """torch's name of a layout."""
    return torch.channels_last if layout == CHANNELS_LAST else torch.contiguous_format


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """A tensor of pictures or feature maps in the layout; any other as it is."""
    return tensor.contiguous(memory_format=memory_format(layout)) if tensor.dim() == 4 else tensor


class PipelineSubject(Subject):
    """Our pipeline, as `gpipe train` builds it; with one micro-batch it is the baseline `naive`."""

    def __init__(self, parts: Ingredients) -> None:
        keep_freed_memory()  # as gpipe train does; baselines are ordinary programs
        config, case = parts.config, parts.case
        self.pipe = Pipeline(
            parts.layers,
            case.partitions,
            case.micro_batches,
            loss_fn=parts.loss_fn,
            balance=case.balance,
            schedule=case.schedule,
            remat=case.remat,
            kept=case.kept,
            taper=case.taper,
            seed=config.seed,
            device=parts.device,
            autocast=torch.bfloat16 if config.precision == "bf16" else None,
            ties=parts.ties,
            groups=parts.groups,
        )
        self.layouts = (CHANNELS_LAST if parts.channels_last else CONTIGUOUS,)
        self.balance, self.num_parameters = self.pipe.balance, self.pipe.num_parameters
        self.kept = num_not_recomputed(self.pipe.schedule) if case.remat == "auto" else None
        self._all_inputs = parts.inputs
        self._inputs: Tensor | None = None
        self._targets = parts.targets if self.pipe.is_last else None
        self.optimizer = parts.optimizer(self.pipe.named_parameters())
        self._result: Any = None
        self.use(self.layouts[0])

    def use(self, layout: str) -> None:
        self.pipe.module.to(memory_format=memory_format(layout))
        self._inputs = in_layout(self._all_inputs, layout) if self.pipe.is_first else None

    def step(self) -> StepFacts:
        self.optimizer.zero_grad()
        result = self._result = self.pipe.forward_backward(self._inputs, self._targets)
        self.optimizer.step()
        return StepFacts(
            # On a GPU the host's waiting says nothing about the device's.
            wait_s=result.wait_s if self.pipe.device.type == "cpu" else None,
            num_bytes_sent=result.num_bytes_sent,
            num_rematerializations=result.num_rematerializations,
            events=result.trace.events,
        )

    def loss(self) -> float | None:
        return float(self._result.loss)

    def tensors(self) -> Iterator[Tensor]:
        yield from self.pipe.module.parameters()
        yield from self.pipe.module.buffers()
