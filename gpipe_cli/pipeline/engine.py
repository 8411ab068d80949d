"""The pipeline as its users see it: a network cut into partitions that trains like the plain network.

For a given number of micro-batches the losses, gradients, running statistics and random draws are those of one process
running all layers, whatever the number of partitions, the balance, re-materialization and the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import gradients
from .layers import Layers, Partition, build_layers, find_ties, named_layers
from .microbatch import Value, flatten, merge, num_samples, split
from .partition import check_balance, cut, layer_ranges
from .policies import cut_weights, make_forward_schedule, make_schedule
from .randomness import preserved_generators
from .runtime import TARGET_CHANNEL, Links, Runtime, StepTrace, make_links
from .schedule import Schedule
from .sizes import split_sizes
from .stage import Counters, Stage, StageLayer
from .transport import Packet, ProcessGroups, Receiver, Sender, make_process_groups, open_connections
from .validation import validate_schedule

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepResult:
    """One mini-batch's outcome, the same on every rank, and what this rank did.

    ``wait_s`` is the time this rank waited for its neighbours, ``step_time_s`` the time of the whole call.
    """

    summary: Tensor  # float64: mean loss over the mini-batch, number of samples
    work: Any
    trace: StepTrace
    step_time_s: float
    wait_s: float
    num_bytes_sent: int
    num_rematerializations: int

    @property
    def loss(self) -> Tensor:
        """Mean loss over the mini-batch's samples, a float64 scalar."""
        if self.work is not None:
            self.work.wait()
        return self.summary[0]

    @property
    def num_samples(self) -> int:
        """Number of samples in the mini-batch."""
        if self.work is not None:
            self.work.wait()
        return int(self.summary[1])


class Pipeline:
    """Cuts a sequence of layers into partitions and trains it with micro-batch pipeline parallelism.

    ``layers``: an nn.Sequential, or pairs of a name and a factory (or a module). A rank builds only its own.
    ``loss_fn(outputs, targets)`` returns the mean over its samples. ``balance``: layers per partition; without it the
    cut minimises the largest partition's work by ``costs`` (one number a layer), or else by parameter counts.
    ``schedule``: "gpipe", "1f1b", "eager_1f1b", "zero_bubble", "interleaved" or a :class:`Schedule`. ``remat``: "full",
    "except_last", "none", or "auto" with ``kept``; ``taper``: smaller first and last micro-batches (see
    :func:`make_schedule` for both).
    ``autocast``: a dtype such as torch.bfloat16 for mixed precision. ``ties``: groups of full parameter names that are
    one parameter (sharing among modules is found without it). ``groups`` and ``replica`` place this pipeline among
    replicas.

    Without an initialised process group all stages run in this process; otherwise construction is collective, and ranks
    host consecutive stages. Raises ValueError or TypeError naming what is wrong.
    """

    def __init__(
        self,
        layers: Layers,
        num_partitions: int = 1,
        num_micro_batches: int = 1,
        *,
        loss_fn: LossFunction,
        balance: Sequence[int] | None = None,
        schedule: str | Schedule = "gpipe",
        remat: str = "full",
        seed: int = 0,
        device: torch.device | str = "cpu",
        autocast: torch.dtype | None = None,
        costs: Sequence[float] | None = None,
        ties: Sequence[Sequence[str]] = (),
        kept: Sequence[int] | None = None,
        taper: bool = False,
        groups: ProcessGroups | None = None,
        replica: int = 0,
    ) -> None:
        named = named_layers(layers)
        self.layer_names = tuple(layer.name for layer in named)
        self.device = torch.device(device)
        self.seed, self.replica, self.step = seed, replica, 0
        self._loss_fn = loss_fn
        found_ties = find_ties(named, ties)
        if groups is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            groups = make_process_groups([range(dist.get_world_size())])
        self._groups = groups
        self.num_ranks = 1 if groups is None else len(groups.ranks)
        self.position = 0 if groups is None else groups.ranks.index(dist.get_rank())
        if num_partitions > len(named):
            cut([1.0] * len(named), num_partitions)  # says what is allowed
        if self.num_ranks > num_partitions:
            raise ValueError(
                f"num_partitions={num_partitions}: {self.num_ranks} processes need at least as many partitions"
            )
        if isinstance(schedule, Schedule):
            if taper:
                raise ValueError("taper belongs to the schedule: give it to make_schedule, or name the schedule")
            _check_schedule(schedule, num_partitions, num_micro_batches, self.num_ranks)
            self.schedule = schedule
        else:
            self.schedule = make_schedule(
                num_partitions, num_micro_batches, schedule, remat, self.num_ranks, kept, taper
            )
        if balance is not None:
            self.balance = check_balance(balance, len(named), num_partitions)
        else:
            layer_costs = costs if costs is not None else _parameter_costs(layers)
            self.balance = cut(layer_costs, num_partitions, cut_weights(self.schedule))
        self._forward_schedule = make_forward_schedule(num_micro_batches, self.schedule.stages_of_rank)

        ranges = layer_ranges(self.balance)
        own_stages = self.schedule.stages_of_rank[self.position]
        own_layers = [index for stage in own_stages for index in ranges[stage]]
        modules = build_layers(named, own_layers, found_ties, seed)
        self.module = Partition((named[index].name, modules[index]) for index in own_layers).to(self.device)
        self._modules = modules
        self._stages = {
            stage: Stage(
                [StageLayer(index, named[index].name, modules[index]) for index in ranges[stage]],
                len(named), num_micro_batches, self.device, autocast,
                {m for number, m in self.schedule.deferred if number == stage},
            )
            for stage in own_stages
        }  # fmt: skip
        rank_of_layer = [self.schedule.rank_of_stage[stage] for stage, members in enumerate(ranges) for _ in members]
        if groups is not None:
            pairs = {*pairwise(self.schedule.rank_of_stage), (0, self.num_ranks - 1)}
            pairs |= gradients.tied_pairs(found_ties, rank_of_layer)
            open_connections(groups, self.position, pairs, self.device)
        self._ties = gradients.TiedParameters(found_ties, modules, rank_of_layer, self.position, groups, self.device)
        self._links = (
            make_links(groups, self.position, self.schedule.rank_of_stage, self.device)
            if groups is not None
            else Links()
        )
        self._runtime = Runtime(self._stages, self._links)
        self._target_sender, self._target_receiver = self._target_channel()
        self.num_parameters = self._count_parameters()

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per mini-batch (M in the paper)."""
        return self.schedule.num_micro_batches

    @property
    def is_first(self) -> bool:
        """Whether this rank hosts the first stage, which takes the inputs."""
        return self.position == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank hosts the last stage, which takes the targets and gives outputs."""
        return self.position == self.num_ranks - 1

    def forward_backward(self, inputs: Value | None, targets: Value | None) -> StepResult:
        """Loss and gradients of one mini-batch; gradients of the mean loss accumulate in ``.grad``.

        ``inputs`` are used by the first stage's rank, ``targets`` by the last stage's; elsewhere they may be None.
        Raises ValueError for a mini-batch with fewer samples than micro-batches.
        """
        began = time.perf_counter()
        waited, sent, recomputed = self._links.wait_s, self._links.num_bytes, self._num_rematerializations()
        micro_batches, micro_targets, sizes = self._split(inputs, targets)
        weights = [size / sum(sizes) for size in sizes] if self.is_last else []

        def ending(outputs: Value, micro_batch: int) -> Tensor:
            loss = self._loss_fn(outputs, micro_targets[micro_batch])
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"loss_fn returned {kind}: it must return the mean over its samples, a scalar tensor")
            return loss

        self._ties.begin()
        try:
            with preserved_generators(self.device):
                trace = self._runtime.train(
                    self.schedule, self.position, micro_batches, weights, ending, self._counters()
                )
        except BaseException:
            for stage in self._stages.values():
                stage.abandon()
            raise
        for stage in self._stages.values():
            stage.finish()
        self._ties.sum_gradients()
        self._flush()
        summary, work = self._share_loss(trace, weights, sum(sizes))
        self.step += 1
        return StepResult(
            summary,
            work,
            trace,
            time.perf_counter() - began,
            self._links.wait_s - waited,
            self._links.num_bytes - sent,
            self._num_rematerializations() - recomputed,
        )

    def evaluate(self, inputs: Value | None) -> Value | None:
        """The network's outputs in evaluation mode, on the last stage's rank (None elsewhere).

        No gradients, no change of weights, buffers, modes or random states; any number of samples of at least one.
        """
        micro_batches: list[Value | None] = []
        if self.is_first:
            if inputs is None or num_samples(inputs) < 1:
                raise ValueError("evaluate needs inputs of at least one sample on the first stage's rank")
            sizes = split_sizes(num_samples(inputs), self.num_micro_batches)
            micro_batches = split(_on(self.device, inputs), sizes)
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            with preserved_generators(self.device):
                trace = self._runtime.evaluate(self._forward_schedule, self.position, micro_batches, self._counters())
        finally:
            for module, training in modes:
                module.training = training
        self._flush()
        if not self.is_last:
            return None
        packets = [packet for _, packet in sorted(trace.outputs.items()) if not packet.is_empty]
        return merge([tuple(t for t in p.tensors if t is not None) if p.is_tuple else _only(p) for p in packets])

    def deliver_targets(self, targets: Value | None) -> Value | None:
        """Carry targets from the first stage's rank, which loads the data, to the last stage's, which needs them.

        Call it on every rank; it returns the targets on the last rank and None on the others. Nothing waits for them to
        leave until the next step or evaluation does: keep the pipeline until then.
        """
        if self.is_first and self.is_last:
            return targets
        if self._target_sender is not None:
            tensors, is_tuple = flatten(targets, "the targets")
            self._target_sender.send("targets", Packet(tensors, is_tuple, (False,) * len(tensors)))
        if self._target_receiver is not None:
            self._target_receiver.expect(["targets"])
            packet = self._target_receiver.receive()
            return tuple(t for t in packet.tensors if t is not None) if packet.is_tuple else _only(packet)
        return None

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most ``max_norm``.

        Tied parameters count once. Returns the norm before scaling, a float64 scalar, the same on every rank.
        """
        return gradients.clip_grad_norm(
            self._modules, self._ties.later_uses, len(self.layer_names), max_norm, self._groups, self.device
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names they have in the plain nn.Sequential."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers, keys as in the plain nn.Sequential."""
        return dict(self.module.state_dict())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's entries from ``state``, which may be that of the whole network.

        Raises KeyError for an entry that is missing and RuntimeError for a shape that differs.
        """
        own = self.module.state_dict()
        missing = sorted(own.keys() - state.keys())
        if missing:
            raise KeyError(f"the state lacks {', '.join(missing[:3])}" + (" and more" if len(missing) > 3 else ""))
        self.module.load_state_dict({key: state[key] for key in own})

    def _flush(self) -> None:
        """Wait until everything has been sent."""
        self._links.flush()
        if self._target_sender is not None:
            self._target_sender.flush()

    def _counters(self) -> Counters:
        return Counters(self.seed, self.replica, self.step)

    def _split(
        self, inputs: Value | None, targets: Value | None
    ) -> tuple[list[Value | None], list[Value | None], tuple[int, ...]]:
        if self.is_first and inputs is None:
            raise ValueError("forward_backward needs inputs on the first stage's rank")
        if self.is_last and targets is None:
            raise ValueError("forward_backward needs targets on the last stage's rank (see deliver_targets)")
        counts = {num_samples(value) for value in (inputs, targets) if value is not None}
        if len(counts) > 1:
            raise ValueError(f"inputs and targets differ in their number of samples: {sorted(counts)}")
        count = counts.pop() if counts else 0
        if (self.is_first or self.is_last) and count < self.num_micro_batches:
            raise ValueError(
                f"num_micro_batches={self.num_micro_batches}: a mini-batch of {count} samples is too small; "
                f"use at most {count} micro-batches or a larger batch"
            )
        sizes = split_sizes(count, self.num_micro_batches, self.schedule.tapered)
        inputs_split = split(_on(self.device, inputs), sizes) if self.is_first and inputs is not None else []
        targets_split = split(_on(self.device, targets), sizes) if self.is_last and targets is not None else []
        return inputs_split, targets_split, sizes

    def _share_loss(self, trace: StepTrace, weights: Sequence[float], count: int) -> tuple[Tensor, Any]:
        summary = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.is_last:
            for micro_batch in sorted(trace.losses):
                summary[0] += trace.losses[micro_batch].double() * weights[micro_batch]
            summary[1] = count
        if self._groups is None:
            return summary, None
        work = dist.broadcast(summary, src=self._groups.ranks[-1], group=self._groups.collective, async_op=True)
        return summary, work

    def _target_channel(self) -> tuple[Sender | None, Receiver | None]:
        if self._groups is None or self.num_ranks == 1:
            return None, None
        control, ranks = self._groups.control, self._groups.ranks
        sender = Sender(ranks[-1], TARGET_CHANNEL, control, control) if self.is_first else None
        receiver = Receiver(ranks[0], TARGET_CHANNEL, control, control, torch.device("cpu")) if self.is_last else None
        return sender, receiver

    def _num_rematerializations(self) -> int:
        return sum(stage.num_rematerializations for stage in self._stages.values())

    def _count_parameters(self) -> int:
        later = self._ties.later_uses
        own = sum(
            parameter.numel()
            for index, module in self._modules.items()
            for name, parameter in module.named_parameters()
            if (index, name) not in later
        )
        if self._groups is None:
            return own
        total = torch.tensor([own], dtype=torch.int64, device="cpu")
        dist.all_reduce(total, group=self._groups.control)
        return int(total)


def _on(device: torch.device, value: Value) -> Value:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return tuple(tensor.to(device, non_blocking=True) for tensor in value)


def _only(packet: Packet) -> Tensor:
    (tensor,) = packet.tensors
    assert tensor is not None
    return tensor


def _parameter_costs(layers: Layers) -> list[int]:
    """One more than each layer's number of parameters; factories are run on the meta device."""
    built = [layer.build_without_data(index) for index, layer in enumerate(named_layers(layers))]
    return [1 + sum(parameter.numel() for parameter in module.parameters()) for module in built]


def _check_schedule(schedule: Schedule, num_stages: int, num_micro_batches: int, num_ranks: int) -> None:
    given = (schedule.num_stages, schedule.num_micro_batches, schedule.num_ranks)
    wanted = (num_stages, num_micro_batches, num_ranks)
    if given != wanted:
        raise ValueError(f"schedule is for (stages, micro-batches, ranks) = {given}, not {wanted}")
    validate_schedule(schedule)
