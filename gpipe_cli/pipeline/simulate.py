"""How long a schedule takes and what it holds, predicted from the costs of its stages. No torch here.

Follows the runtime: a rank runs its operations in their order; one starts when the rank is free and the results it
needs have arrived. Sends cost the sender no time, and what one rank sends another in one direction travels one after
the other. A recomputation needs nothing from the neighbours, so it fills the wait for a gradient.

Times may be of any exact type (int, Fraction): nothing is rounded, so the bubble of equal stages without
re-materialization and with free transfers is (K - 1) / (M + K - 1) to the last digit (paper, section 2.3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from .schedule import Event, Operation, OperationKind, Schedule, deferred_in, ends, predecessors


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch costs on one stage; ``update_s`` is the same for all of them.

    ``transfer_s``: seconds from the end of an operation until its result is usable on the next stage's rank; the
    gradient on its way back takes as long. ``rematerialize_s`` is the forward pass's time where it is not given.
    ``weights_s``: what of ``backward_s`` is for the weights and may come later; half of it where it is not given.
    ``update_s``: the optimizer's step, once a mini-batch. ``input_bytes``: the stage's inputs, held from the forward
    to the backward pass; ``activation_bytes``: what is held besides them while the activations are kept, its outputs
    among them; ``saved_bytes``: how much of both autograd itself keeps; ``shared_bytes``: how much of the inputs both
    this stage and the one before keep so, where they are on the same rank; ``waiting_bytes``: what is held instead of
    all that while the gradients of weights wait.
    """

    forward_s: float
    backward_s: float
    rematerialize_s: float | None = None
    weights_s: float | None = None
    transfer_s: float = 0
    update_s: float = 0
    input_bytes: int = 0
    activation_bytes: int = 0
    saved_bytes: int = 0
    shared_bytes: int = 0
    waiting_bytes: int = 0

    def seconds(self, kind: OperationKind, deferred: bool = False) -> float:
        """The one cost rule: seconds of an operation of this kind; ``deferred``: the weights' gradients come later."""
        if kind is OperationKind.FORWARD:
            return self.forward_s
        weights_s = self.backward_s / 2 if self.weights_s is None else self.weights_s
        if kind is OperationKind.WEIGHTS:
            return weights_s
        if kind is OperationKind.BACKWARD:
            return self.backward_s - weights_s if deferred else self.backward_s
        return self.forward_s if self.rematerialize_s is None else self.rematerialize_s


@dataclass(frozen=True)
class Simulation:
    """A predicted mini-batch; the tuples have an entry per rank.

    ``step_time_s``: until the last rank is done, optimizer included. ``bubble_fraction``: share of the ranks' time in
    which they wait. ``peak_activation_bytes``: kept activations and inputs at the worst moment; ``peak_saved_bytes``:
    of these, what autograd holds, which is what an ActivationMeter counts. ``peak_stored_micro_batches``: most
    micro-batches between forward and backward pass, over all stages of the rank.
    """

    events: tuple[tuple[Event, ...], ...]
    step_time_s: float
    bubble_fraction: float
    busy_s: tuple[float, ...]
    peak_activation_bytes: tuple[int, ...]
    peak_saved_bytes: tuple[int, ...]
    peak_stored_micro_batches: tuple[int, ...]


def simulate(schedule: Schedule, costs: Sequence[StageCost] | Sequence[Sequence[StageCost]]) -> Simulation:
    """Predict a mini-batch of ``schedule`` with one cost a stage; or with such a sequence for each micro-batch, where
    their sizes differ.

    Raises ValueError for another number of costs, or a schedule that never ends.
    """
    numbers = {len(cost) if isinstance(cost, Sequence) else len(costs) for cost in costs} or {0}
    if numbers != {schedule.num_stages}:
        raise ValueError(f"{max(numbers)} costs for {schedule.num_stages} stages: give one for each")
    if isinstance(costs[0], Sequence) and len(costs) != schedule.num_micro_batches:
        raise ValueError(f"costs of {len(costs)} micro-batches, not {schedule.num_micro_batches}: give those of each")
    events = _run(schedule, costs)
    updates = [sum(of_micro_batch(costs, 0)[stage].update_s for stage in own) for own in schedule.stages_of_rank]
    busy = tuple(
        sum(event.end_s - event.start_s for event in ran) + update for ran, update in zip(events, updates, strict=True)
    )
    step_time = max((ran[-1].end_s if ran else 0) + update for ran, update in zip(events, updates, strict=True))
    available = schedule.num_ranks * step_time
    peaks = [peak_memory(operations, costs) for operations in schedule.operations]
    return Simulation(
        events=events,
        step_time_s=step_time,
        bubble_fraction=(available - sum(busy)) / available if available else 0,
        busy_s=busy,
        peak_activation_bytes=tuple(peak[0] for peak in peaks),
        peak_saved_bytes=tuple(peak[1] for peak in peaks),
        peak_stored_micro_batches=tuple(peak[2] for peak in peaks),
    )


def _run(
    schedule: Schedule, costs: Sequence[StageCost] | Sequence[Sequence[StageCost]]
) -> tuple[tuple[Event, ...], ...]:
    home = schedule.rank_of_stage
    ended: dict[Operation, float] = {}
    arrived: dict[Operation, float] = {}  # results that cross to another rank
    link_free: dict[tuple[int, int, OperationKind], float] = defaultdict(int)
    free: list[float] = [0] * schedule.num_ranks
    events: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
    remaining = sum(len(operations) for operations in schedule.operations)
    while remaining:
        before = remaining
        for rank, operations in enumerate(schedule.operations):
            for op in operations[len(events[rank]) :]:
                needs = predecessors(schedule, op)
                if any(need not in ended for need in needs):
                    break
                ready = [ended[n] if home[n.stage] == rank else arrived[n] for n in needs]
                start = max([free[rank], *ready])
                of_stage = of_micro_batch(costs, op.micro_batch)
                end = start + of_stage[op.stage].seconds(op.kind, (op.stage, op.micro_batch) in schedule.deferred)
                events[rank].append(Event(op, start, end))
                ended[op] = free[rank] = end
                remaining -= 1
                boundary = _crossed(op)
                if 0 <= boundary < schedule.num_stages - 1:
                    target = home[boundary + 1] if op.kind is OperationKind.FORWARD else home[boundary]
                    if target != rank:
                        link = (rank, target, op.kind)
                        arrived[op] = link_free[link] = max(end, link_free[link]) + of_stage[boundary].transfer_s
        if remaining == before:
            raise ValueError("the schedule never ends: validate_schedule shows where it is stuck")
    return tuple(tuple(ran) for ran in events)


def _crossed(op: Operation) -> int:
    """The stage whose output boundary the result of ``op`` crosses; -1 for none."""
    if op.kind is OperationKind.FORWARD:
        return op.stage
    return op.stage - 1 if op.kind is OperationKind.BACKWARD else -1


class Held(Protocol):
    """What a stage holds of a micro-batch, in bytes: see StageCost."""

    @property
    def input_bytes(self) -> int: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def waiting_bytes(self) -> int: ...


AnyCost = TypeVar("AnyCost")


def of_micro_batch(costs: Sequence[AnyCost] | Sequence[Sequence[AnyCost]], micro_batch: int) -> Sequence[AnyCost]:
    """A micro-batch's costs by stage: its own, where ``costs`` has a sequence for each, or those of all."""
    if isinstance(costs[0], Sequence):
        return cast(Sequence[AnyCost], costs[micro_batch])
    return cast(Sequence[AnyCost], costs)


def peak_memory(
    operations: Sequence[Operation], costs: Sequence[Held] | Sequence[Sequence[Held]]
) -> tuple[int, int, int]:
    """Most bytes held, most bytes held by autograd, most micro-batches stored, while a rank runs ``operations``;
    ``costs`` as for :func:`simulate`."""
    recomputed = {(op.stage, op.micro_batch) for op in operations if op.kind is OperationKind.REMATERIALIZE}
    deferred = deferred_in(operations)
    own = {op.stage for op in operations}
    held = saved = stored = 0
    peak_held = peak_saved = peak_stored = 0
    for op in operations:
        cost = of_micro_batch(costs, op.micro_batch)[op.stage]
        # Inputs that the stage before hands over within the rank are its outputs: while it keeps those, the same bytes.
        handed_over = op.stage - 1 in own and (op.stage - 1, op.micro_batch) not in recomputed
        input_bytes = 0 if handed_over else cost.input_bytes
        saved_bytes = cost.saved_bytes - (cost.shared_bytes if handed_over else 0)
        if op.kind is OperationKind.FORWARD:
            stored += 1
            held += input_bytes
        if op.kind is OperationKind.REMATERIALIZE or (
            op.kind is OperationKind.FORWARD and (op.stage, op.micro_batch) not in recomputed
        ):
            held, saved = held + cost.activation_bytes, saved + saved_bytes
        peak_held, peak_saved, peak_stored = max(peak_held, held), max(peak_saved, saved), max(peak_stored, stored)
        if op.kind is OperationKind.BACKWARD:
            waiting_bytes = cost.waiting_bytes if (op.stage, op.micro_batch) in deferred else 0
            held += waiting_bytes - cost.activation_bytes - input_bytes
            saved += waiting_bytes - saved_bytes
            peak_held, peak_saved = max(peak_held, held), max(peak_saved, saved)
        if op.kind is OperationKind.WEIGHTS:
            held, saved = held - cost.waiting_bytes, saved - cost.waiting_bytes
        stored -= ends(op, deferred)
    return peak_held, peak_saved, peak_stored
