"""Runs one rank's operations of a schedule: takes what an operation needs, lets the stage work, hands the result on.

Between two stages of one rank a packet is handed over in memory; between ranks it travels (see transport). The runtime
knows no policy: the order comes from the schedule.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .microbatch import Value, flatten
from .schedule import Operation, OperationKind, Schedule
from .stage import Counters, Ending, Stage
from .transport import EMPTY, Packet, ProcessGroups, Receiver, Sender


@dataclass(frozen=True)
class Links:
    """A rank's channels to its neighbours; None at the ends of the pipeline."""

    to_next: Sender | None = None
    from_next: Receiver | None = None
    to_previous: Sender | None = None
    from_previous: Receiver | None = None

    def reap(self) -> None:
        """Let go of what has been sent."""
        for sender in (self.to_next, self.to_previous):
            if sender is not None:
                sender.reap()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for sender in (self.to_next, self.to_previous):
            if sender is not None:
                sender.flush()

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for neighbours so far."""
        return sum(r.wait_s for r in (self.from_previous, self.from_next) if r is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors sent to neighbours so far."""
        return sum(s.num_bytes for s in (self.to_previous, self.to_next) if s is not None)


FORWARD_CHANNEL, BACKWARD_CHANNEL, TARGET_CHANNEL, TIE_CHANNEL = range(4)


def make_links(groups: ProcessGroups, position: int, device: torch.device) -> Links:
    """Channels of the rank at ``position`` in the pipeline."""
    ranks = groups.ranks
    following = ranks[position + 1] if position + 1 < len(ranks) else None
    before = ranks[position - 1] if position > 0 else None
    forward, backward, control = groups.forward, groups.backward, groups.control
    return Links(
        None if following is None else Sender(following, FORWARD_CHANNEL, forward, control),
        None if following is None else Receiver(following, BACKWARD_CHANNEL, backward, control, device),
        None if before is None else Sender(before, BACKWARD_CHANNEL, backward, control),
        None if before is None else Receiver(before, FORWARD_CHANNEL, forward, control, device),
    )


@dataclass(frozen=True)
class Event:
    """When an operation ran, in seconds of time.perf_counter (on a GPU: when it was issued)."""

    operation: Operation
    start_s: float
    end_s: float


@dataclass
class StepTrace:
    """What a rank did in a step: losses of the micro-batches (last stage only) and the events of its operations."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Packet] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class Runtime:
    """Executes the operations of one rank."""

    def __init__(self, stages: Mapping[int, Stage], links: Links) -> None:
        self._stages = stages
        self._links = links

    def train(
        self,
        schedule: Schedule,
        rank: int,
        micro_batches: Sequence[Value | None],
        weights: Sequence[float],
        ending: Ending,
        counters: Counters,
    ) -> StepTrace:
        """One mini-batch, forward and backward. ``micro_batches`` are used by the first stage, ``weights`` (each
        micro-batch's share of the samples) by the last."""
        trace = StepTrace()
        operations = schedule.operations[rank]
        kept = schedule.rematerialized
        last_stage = schedule.num_stages - 1
        values: dict[tuple[int, int], Packet] = {}  # (stage, micro-batch) -> its input, handed over in this rank
        gradients: dict[tuple[int, int], Packet] = {}
        self._expect(schedule, operations, "train")
        for op in operations:
            start = time.perf_counter()
            stage, m = self._stages[op.stage], op.micro_batch
            finish = ending if op.stage == last_stage else None
            if op.kind is OperationKind.FORWARD:
                packet = self._input(op, micro_batches, values)
                start = time.perf_counter()
                output = stage.forward(m, packet, (op.stage, m) not in kept, counters, finish)
                if finish is not None:
                    (loss,) = output.tensors
                    assert loss is not None
                    trace.losses[m] = loss
                else:
                    self._pass_on(op, output, values, "train")
            elif op.kind is OperationKind.REMATERIALIZE:
                stage.rematerialize(m, counters, finish)
            else:
                if finish is not None:
                    loss = trace.losses[m]
                    received = Packet((torch.full_like(loss, weights[m]),), False, (False,))
                elif op.stage + 1 in self._stages:
                    received = gradients.pop((op.stage, m))
                else:
                    assert self._links.from_next is not None
                    received = self._links.from_next.receive()
                start = time.perf_counter()
                result = stage.backward(m, received.tensors)
                if op.stage - 1 in self._stages:
                    gradients[(op.stage - 1, m)] = result
                elif op.stage > 0:
                    assert self._links.to_previous is not None
                    self._links.to_previous.send(("train", m), result)
            self._links.reap()
            trace.events.append(Event(op, start, time.perf_counter()))
        return trace

    def evaluate(
        self, schedule: Schedule, rank: int, micro_batches: Sequence[Value | None], counters: Counters
    ) -> StepTrace:
        """Forward passes only; the last stage's outputs are in the trace."""
        trace = StepTrace()
        operations = schedule.operations[rank]
        values: dict[tuple[int, int], Packet] = {}
        self._expect(schedule, operations, "evaluate")
        for op in operations:
            packet = self._input(op, micro_batches, values)
            output = self._stages[op.stage].evaluate(op.micro_batch, packet, counters)
            if op.stage == schedule.num_stages - 1:
                trace.outputs[op.micro_batch] = output
            else:
                self._pass_on(op, output, values, "evaluate")
            self._links.reap()
        return trace

    def _expect(self, schedule: Schedule, operations: Sequence[Operation], mode: str) -> None:
        first, last = min(self._stages), max(self._stages)
        if self._links.from_previous is not None:
            self._links.from_previous.expect(
                [(mode, op.micro_batch) for op in operations if op.kind is OperationKind.FORWARD and op.stage == first]
            )
        if self._links.from_next is not None and schedule.policy != "forward":
            self._links.from_next.expect(
                [(mode, op.micro_batch) for op in operations if op.kind is OperationKind.BACKWARD and op.stage == last]
            )

    def _input(
        self, op: Operation, micro_batches: Sequence[Value | None], values: dict[tuple[int, int], Packet]
    ) -> Packet:
        if op.stage == 0:
            value = micro_batches[op.micro_batch]
            if value is None:
                return EMPTY
            tensors, is_tuple = flatten(value, "the mini-batch")
            return Packet(tensors, is_tuple, (False,) * len(tensors))
        if op.stage - 1 in self._stages:
            return values.pop((op.stage, op.micro_batch))
        assert self._links.from_previous is not None
        return self._links.from_previous.receive()

    def _pass_on(self, op: Operation, output: Packet, values: dict[tuple[int, int], Packet], mode: str) -> None:
        if op.stage + 1 in self._stages:
            values[(op.stage + 1, op.micro_batch)] = output
        else:
            assert self._links.to_next is not None
            self._links.to_next.send((mode, op.micro_batch), output)
