"""Times measured on this machine, for plans that start from the clock instead of counted operations."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gpipe_cli.pipeline import Layers
from gpipe_cli.pipeline.profile import measure_layers
from gpipe_cli.pipeline.schedule import Event, OperationKind
from gpipe_cli.pipeline.simulate import StageCost
from gpipe_cli.planning.cpu import threads_of_rank
from gpipe_cli.planning.network import sample_of

if TYPE_CHECKING:
    from gpipe_cli.config_plan import PlanConfig


def measured_layers(config: PlanConfig, layers: Layers, num_samples: int, ranks: int) -> tuple[float, ...]:
    """Seconds of each layer's forward and backward pass on this CPU, with the threads that one of `ranks` ranks has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads_of_rank(ranks))
    try:
        sample = sample_of(config, num_samples, torch.device("cpu"))
        return measure_layers(layers, sample, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def costs_of_events(events: Sequence[Sequence[Event]], costs: Sequence[StageCost]) -> tuple[StageCost, ...]:
    """`costs` with the median times of measured events, a sequence per rank (StepResult.trace.events).

    An operation that did not run keeps its time. The runtime notes an operation's start after its input has arrived, so
    waiting is not part of it; sending is.
    """
    seconds: dict[tuple[int, OperationKind], list[float]] = defaultdict(list)
    for ran in events:
        for event in ran:
            seconds[event.operation.stage, event.operation.kind].append(event.end_s - event.start_s)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    return tuple(
        replace(
            cost,
            forward_s=medians.get((stage, OperationKind.FORWARD), cost.forward_s),
            backward_s=medians.get((stage, OperationKind.BACKWARD), cost.backward_s),
            rematerialize_s=medians.get((stage, OperationKind.REMATERIALIZE), cost.rematerialize_s),
        )
        for stage, cost in enumerate(costs)
    )


def costs_between(
    small: Sequence[StageCost], num_small: int, large: Sequence[StageCost], num_large: int, num_samples: int
) -> tuple[StageCost, ...]:
    """Costs for micro-batches of `num_samples` from those of two other sizes: a fixed part and one per sample.

    Raises ValueError unless the two sizes differ.
    """
    if num_small == num_large:
        raise ValueError(f"two sizes of micro-batch are needed, both are {num_small}")
    share = (num_samples - num_small) / (num_large - num_small)

    def between(one: float, other: float) -> float:
        return max(0.0, one + share * (other - one))

    def middle(one: StageCost, other: StageCost) -> StageCost:
        recompute = (one.seconds(OperationKind.REMATERIALIZE), other.seconds(OperationKind.REMATERIALIZE))
        return StageCost(
            forward_s=between(one.forward_s, other.forward_s),
            backward_s=between(one.backward_s, other.backward_s),
            rematerialize_s=between(*recompute),
            transfer_s=between(one.transfer_s, other.transfer_s),
            update_s=(one.update_s + other.update_s) / 2,
            input_bytes=math.ceil(between(one.input_bytes, other.input_bytes)),
            activation_bytes=math.ceil(between(one.activation_bytes, other.activation_bytes)),
            saved_bytes=math.ceil(between(one.saved_bytes, other.saved_bytes)),
            shared_bytes=math.ceil(between(one.shared_bytes, other.shared_bytes)),
        )

    return tuple(middle(one, other) for one, other in zip(small, large, strict=True))
