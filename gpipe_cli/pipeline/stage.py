"""One partition's layers on one device: forward, re-materialize, backward, micro-batch by micro-batch.

Between stages the graph is cut: a stage's inputs are leaves of its own graph, and what crosses the boundary are values
in one direction and gradients in the other. Re-materialization (paper, section 2.3; Chen et al. 2016) keeps only the
inputs and runs the layers again before the backward pass, with the same random draws and without moving running
statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .batchnorm import BatchNormStatistics
from .deferral import Deferral
from .layers import Partition
from .microbatch import Value, flatten, unflatten
from .randomness import EVALUATION, TRAINING, derive_seed, seed_generators
from .transport import EMPTY, Packet

# The last stage's ending: (network output, micro-batch index) -> mean loss of the micro-batch, a scalar.
Ending: TypeAlias = Callable[[Value, int], Tensor]


@dataclass(frozen=True)
class StageLayer:
    """A built layer with its place in the whole network."""

    index: int
    name: str
    module: nn.Module


@dataclass(frozen=True)
class Counters:
    """What random draws depend on besides micro-batch and layer: run seed, replica, step."""

    seed: int
    replica: int
    step: int


class Stage:
    """Runs its layers on micro-batches and holds what their backward passes need.

    ``num_layers`` is that of the whole network; the ending draws its random numbers as the layer after the last.
    ``deferred``: the micro-batches whose backward pass leaves the gradients of weights to :meth:`weight_gradients`.
    """

    def __init__(
        self,
        layers: Sequence[StageLayer],
        num_layers: int,
        num_micro_batches: int,
        device: torch.device,
        autocast: torch.dtype | None,
        deferred: Set[int] = frozenset(),
    ) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.num_rematerializations = 0
        self._num_layers = num_layers
        self._autocast = autocast
        self._deferrals = {micro_batch: Deferral() for micro_batch in deferred}
        self._module = Partition((layer.name, layer.module) for layer in layers)
        self._statistics = BatchNormStatistics(self._module, num_micro_batches)
        self._stashed: dict[int, Packet] = {}  # micro-batch -> inputs to recompute from
        self._leaves: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        # Micro-batches in which nothing is trained here or before, as in a frozen body: how many inputs each has.
        self._untrained: dict[int, int] = {}
        # Whether the layers overwrite an input in place; None until the first pass has shown it.
        self._overwrites: tuple[bool, ...] | None = None

    def forward(
        self, micro_batch: int, packet: Packet, keep: bool, counters: Counters, ending: Ending | None
    ) -> Packet:
        """Run the layers on a micro-batch in training mode.

        ``keep``: hold the activations for the backward pass; otherwise only the inputs, and :meth:`rematerialize` must
        come before :meth:`backward`. With ``ending`` (the last stage) the packet returned holds the loss.
        """
        trainable = any(packet.requires_grad) or any(p.requires_grad for p in self._module.parameters())
        keep = keep and trainable
        if not trainable:
            self._untrained[micro_batch] = len(packet.requires_grad)
        elif not keep:
            self._stashed[micro_batch] = packet
        with torch.set_grad_enabled(keep):
            outputs, is_tuple = self._run(micro_batch, packet, counters, ending, recomputing=False)
        if keep:
            self._outputs[micro_batch] = outputs
            flags = tuple(tensor.requires_grad for tensor in outputs)
        else:
            # Without a graph it is unknown which outputs depend on parameters; the backward pass drops what is not
            # needed.
            flags = tuple(trainable and _differentiable(tensor) for tensor in outputs)
        return Packet(tuple(tensor.detach() for tensor in outputs), is_tuple, flags)

    def rematerialize(self, micro_batch: int, counters: Counters, ending: Ending | None) -> None:
        """Compute a micro-batch's activations again from its inputs, if anything here or before is trained."""
        if micro_batch in self._untrained:
            return
        packet = self._stashed.pop(micro_batch)
        self.num_rematerializations += 1
        with torch.enable_grad():
            self._outputs[micro_batch], _ = self._run(micro_batch, packet, counters, ending, recomputing=True)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> Packet:
        """Accumulate parameter gradients; returns the gradients of the stage's inputs, None where there is none."""
        if micro_batch in self._untrained:
            num_inputs = self._untrained.pop(micro_batch)
            return Packet((None,) * num_inputs, True, (False,) * num_inputs)
        outputs = self._outputs.pop(micro_batch)
        leaves = self._leaves.pop(micro_batch)
        roots = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        return Packet(tuple(leaf.grad for leaf in leaves), True, (False,) * len(leaves))

    def weight_gradients(self, micro_batch: int) -> None:
        """Accumulate the parameter gradients that the backward pass of a deferred micro-batch left."""
        self._deferrals[micro_batch].run()

    def evaluate(self, micro_batch: int, packet: Packet, counters: Counters) -> Packet:
        """Run the layers as they are (the caller sets evaluation mode), without gradients and without a trace."""
        if packet.is_empty:
            return EMPTY
        with torch.no_grad():
            value = unflatten([t for t in packet.tensors if t is not None], packet.is_tuple)
            outputs, is_tuple = self._layers(value, micro_batch, counters, EVALUATION, None)
        return Packet(outputs, is_tuple, (False,) * len(outputs))

    def finish(self) -> None:
        """End a mini-batch: running statistics move once."""
        self._statistics.commit()

    def abandon(self) -> None:
        """Forget a mini-batch that failed half way."""
        self._statistics.discard()
        for held in (self._stashed, self._leaves, self._outputs, self._untrained):
            held.clear()
        for deferral in self._deferrals.values():
            deferral.discard()

    def _run(
        self, micro_batch: int, packet: Packet, counters: Counters, ending: Ending | None, recomputing: bool
    ) -> tuple[tuple[Tensor, ...], bool]:
        grad = torch.is_grad_enabled()
        leaves = tuple(
            tensor.detach().requires_grad_(grad and flag)
            for tensor, flag in zip(packet.tensors, packet.requires_grad, strict=True)
            if tensor is not None
        )
        # A layer may overwrite its input in place (nn.ReLU(inplace=True) first in a stage). That must touch neither a
        # leaf nor the inputs kept for recomputation, so such inputs are copied; the first pass finds out which.
        known = self._overwrites is not None and len(self._overwrites) == len(leaves)
        copied = self._overwrites if known and self._overwrites else (True,) * len(leaves)
        entries = [leaf.clone() if copy else leaf for leaf, copy in zip(leaves, copied, strict=True)]
        versions = [entry._version for entry in entries]
        deferral = self._deferrals.get(micro_batch) if grad else None
        with self._statistics.micro_batch(micro_batch, recomputing), deferral or nullcontext():
            outputs, is_tuple = self._layers(
                unflatten(entries, packet.is_tuple), micro_batch, counters, TRAINING, ending
            )
        changed = tuple(entry._version != version for entry, version in zip(entries, versions, strict=True))
        if not known:
            self._overwrites = changed
        elif any(change and not copy for change, copy in zip(changed, copied, strict=True)):
            raise RuntimeError(
                f"layers {self.layers[0].name!r} to {self.layers[-1].name!r} overwrite their input in place now, "
                "which they did not in their first pass: let the first layer of a stage work out of place"
            )
        if grad:
            self._leaves[micro_batch] = leaves
        return outputs, is_tuple

    def _layers(
        self, value: Value, micro_batch: int, counters: Counters, stream: int, ending: Ending | None
    ) -> tuple[tuple[Tensor, ...], bool]:
        for layer in self.layers:
            self._seed(stream, counters, micro_batch, layer.index)
            with self._precision():
                value = layer.module(value)
            flatten(value, f"layer {layer.name!r}")
        if ending is not None:
            self._seed(stream, counters, micro_batch, self._num_layers)
            with self._precision():
                value = ending(value, micro_batch)
        return flatten(value, "the loss function" if ending is not None else "the stage")

    def _seed(self, stream: int, counters: Counters, micro_batch: int, layer: int) -> None:
        seed_generators(
            self.device, derive_seed(stream, counters.seed, counters.replica, counters.step, micro_batch, layer)
        )

    def _precision(self) -> AbstractContextManager[object]:
        # Entered anew for each layer: leaving it drops the cache of cast weights, which a pass without gradients would
        # poison.
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, dtype=self._autocast)


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
