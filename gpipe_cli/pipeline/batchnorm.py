"""Batch normalisation under micro-batches: normalise by the micro-batch, track the mini-batch.

Paper, section 2.3: statistics for normalising come from each micro-batch, moving averages for evaluation from the whole
mini-batch. The layer itself computes a micro-batch's mean and variance anyway; here it writes them into scratch buffers
(momentum 1 into zeros gives them exactly) instead of its running statistics, at no extra pass over the data. At the
end of the mini-batch the moments are combined exactly (Chan et al. 1979) and the running statistics move once, by
PyTorch's convention (unbiased variance). Recomputation writes into scratch that nobody reads.

Works for every subclass of torch's batch norm that normalises through its own attributes (timm's fused ones included),
because forward hooks swap the attributes and the class stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Channel ranges in the flat scratch start at multiples of this, so that vector loads stay aligned.
ALIGNMENT = 32


@dataclass
class _Tracked:
    """One batch-norm module, its place in the flat scratch, and what the hooks took out of it."""

    name: str
    module: _BatchNorm
    start: int
    num_channels: int
    num_values: dict[int, int] = field(default_factory=dict)  # micro-batch -> values per channel
    scratch: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # this module's columns, row by row
    saved: tuple[Tensor, Tensor, Tensor | None, float | None] | None = None

    @property
    def channels(self) -> slice:
        """This module's columns in the flat scratch."""
        return slice(self.start, self.start + self.num_channels)


class BatchNormStatistics:
    """Collects the moments of every tracking batch norm below ``module`` over the micro-batches of a mini-batch."""

    def __init__(self, module: nn.Module, num_micro_batches: int) -> None:
        self._tracked: list[_Tracked] = []
        self._num_micro_batches = num_micro_batches
        self._micro_batch: int | None = None  # None: not inside a pipeline's forward pass, the layers behave as usual
        self._recomputing = False
        start = 0
        for name, child in module.named_modules():
            if isinstance(child, _BatchNorm) and child.track_running_stats and child.running_mean is not None:
                entry = _Tracked(name, child, start, child.num_features)
                self._tracked.append(entry)
                start += -(-child.num_features // ALIGNMENT) * ALIGNMENT
                child.register_forward_pre_hook(_Enter(self, entry))
                child.register_forward_hook(_Leave(entry), always_call=True)
        self._width = start
        self._means: Tensor | None = None  # (micro-batches + 1, channels): the last row is scratch for recomputation
        self._variances: Tensor | None = None
        self._counts_signature: object = None
        self._counts_cache = torch.empty(0)

    @contextmanager
    def micro_batch(self, index: int, recomputing: bool) -> Iterator[None]:
        """Forward passes inside belong to micro-batch ``index``; those that recompute leave no trace."""
        self._micro_batch, self._recomputing = index, recomputing
        if self._tracked:
            self._clear(self._row)
        try:
            yield
        finally:
            self._micro_batch = None

    def commit(self) -> None:
        """Move the running statistics once, by the statistics of the whole mini-batch, and forget the moments."""
        moved = [entry for entry in self._tracked if entry.num_values]
        if not moved:
            return
        assert self._means is not None
        assert self._variances is not None
        mean, variance = _combine(self._counts(), self._means, self._variances)
        for entry in moved:
            module = entry.module
            assert module.running_mean is not None
            assert module.running_var is not None
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
            factor = module.momentum
            if factor is None:  # torch's cumulative average
                factor = 1.0 / float(module.num_batches_tracked or 1)
            module.running_mean.lerp_(mean[entry.channels], factor)
            module.running_var.lerp_(variance[entry.channels], factor)
        self.discard()

    def _counts(self) -> Tensor:
        """Values per (micro-batch, channel) as float64; kept from step to step while they stay the same."""
        assert self._means is not None
        signature = tuple(tuple(entry.num_values.items()) for entry in self._tracked)
        if signature != self._counts_signature:
            counts = torch.zeros(self._num_micro_batches, self._width, dtype=torch.float64)
            for entry in self._tracked:
                for row, values in entry.num_values.items():
                    counts[row, entry.channels] = values
            self._counts_cache, self._counts_signature = counts.to(self._means.device), signature
        return self._counts_cache

    def discard(self) -> None:
        """Forget the moments of an unfinished mini-batch."""
        for entry in self._tracked:
            entry.num_values = {}

    @property
    def _row(self) -> int:
        if self._recomputing or self._micro_batch is None:
            return self._num_micro_batches
        return self._micro_batch

    def _clear(self, row: int) -> None:
        """Zeros into a row of the scratch, which is made when it is first needed: only then is its device known."""
        running = self._tracked[0].module.running_mean
        assert running is not None
        kind = (running.device, running.dtype)
        if self._means is None or self._variances is None or (self._means.device, self._means.dtype) != kind:
            shape = (self._num_micro_batches + 1, self._width)
            self._means = torch.zeros(shape, dtype=running.dtype, device=running.device)
            self._variances = torch.zeros_like(self._means)
            for entry in self._tracked:
                rows = zip(self._means[:, entry.channels], self._variances[:, entry.channels], strict=True)
                entry.scratch = list(rows)
        else:
            self._means[row].zero_()
            self._variances[row].zero_()

    def scratch(self, entry: _Tracked) -> tuple[Tensor, Tensor]:
        """What ``entry`` writes the current micro-batch's mean and variance into: zeros."""
        mean, variance = entry.scratch[self._row]
        # Through .data, each use counts its versions alone: autograd remembers the running statistics of every forward
        # pass, though a training-mode backward pass never reads them, and must not see them change.
        return mean.data, variance.data

    def note(self, entry: _Tracked, input: Tensor) -> None:
        """Remember how many values a channel had; raises ValueError when a module runs twice on one micro-batch."""
        if self._recomputing:
            return
        assert self._micro_batch is not None
        if self._micro_batch in entry.num_values:
            raise ValueError(
                f"batch norm {entry.name} runs twice in one forward pass: give each use a module of its own, "
                "or set track_running_stats=False"
            )
        entry.num_values[self._micro_batch] = input.numel() // input.shape[1]

    @property
    def active(self) -> bool:
        """Whether a pipeline's forward pass is going on."""
        return self._micro_batch is not None

    def __deepcopy__(self, memo: dict[int, object]) -> BatchNormStatistics:
        # A copy of the layers (an average of the weights, say) is no part of the pipeline: its hooks must stay idle.
        idle = BatchNormStatistics(nn.Module(), self._num_micro_batches)
        memo[id(self)] = idle
        return idle


def _combine(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over all values from those of the parts: (parts, channels) -> (channels,).

    Row by row, not by a reduction: the order of a sum must not depend on where a channel lies in the flat scratch.
    """
    total, mean = torch.zeros_like(counts[0]), torch.zeros_like(counts[0])
    for row, count in enumerate(counts):
        total = total + count
        mean = mean + count * means[row].double()
    mean = mean / total
    squares = torch.zeros_like(mean)
    for row, count in enumerate(counts):
        deviation = means[row].double() - mean
        squares = squares + ((count - 1).clamp_min(0) * variances[row].double() + count * deviation * deviation)
    return mean.to(means.dtype), (squares / (total - 1)).to(means.dtype)


class _Enter:
    """Pre-hook: put scratch in the place of the running statistics.

    Into the module's dictionaries: assigning attributes of a module looks through all of them, which for a network of
    many small batch norms took an eighth of the step.
    """

    def __init__(self, statistics: BatchNormStatistics, entry: _Tracked) -> None:
        self._statistics, self._entry = statistics, entry

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        entry, statistics = self._entry, self._statistics
        if not (statistics.active and module.training):
            return
        assert isinstance(module, _BatchNorm)
        statistics.note(entry, args[0])
        buffers = module._buffers
        mean, variance = buffers["running_mean"], buffers["running_var"]
        assert mean is not None
        assert variance is not None
        entry.saved = (mean, variance, buffers["num_batches_tracked"], module.momentum)
        buffers["running_mean"], buffers["running_var"] = statistics.scratch(entry)
        buffers["num_batches_tracked"] = None
        module.__dict__["momentum"] = 1.0


class _Leave:
    """Hook, called also when the forward pass raises: put the running statistics back."""

    def __init__(self, entry: _Tracked) -> None:
        self._entry = entry

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        del args, output
        entry = self._entry
        if entry.saved is not None:
            buffers = module._buffers
            buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"], momentum = entry.saved
            module.__dict__["momentum"] = momentum
            entry.saved = None
