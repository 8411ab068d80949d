"""Runs one rank's operations of a schedule: takes what an operation needs, lets the stage work, hands the result on.

Between two stages of one rank a packet is handed over in memory; between ranks it travels (see transport). The runtime
knows no policy: the order comes from the schedule.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from .microbatch import Value, flatten
from .schedule import Event, Operation, OperationKind, Schedule, messages
from .shared_memory import connect
from .stage import Counters, Ending, Stage
from .transport import EMPTY, Packet, ProcessGroups, Receiver, Sender

FORWARD_CHANNEL, BACKWARD_CHANNEL, TARGET_CHANNEL, TIE_CHANNEL = range(4)


@dataclass(frozen=True)
class Links:
    """A rank's channels by the position of the other rank: values travel forward, gradients backward."""

    send_values: Mapping[int, Sender] = field(default_factory=dict)
    receive_values: Mapping[int, Receiver] = field(default_factory=dict)
    send_gradients: Mapping[int, Sender] = field(default_factory=dict)
    receive_gradients: Mapping[int, Receiver] = field(default_factory=dict)

    @property
    def _senders(self) -> tuple[Sender, ...]:
        return (*self.send_values.values(), *self.send_gradients.values())

    def reap(self) -> None:
        """Let go of what has been sent."""
        for sender in self._senders:
            sender.reap()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for sender in self._senders:
            sender.flush()

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for other ranks so far."""
        return sum(r.wait_s for r in (*self.receive_values.values(), *self.receive_gradients.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors sent to other ranks so far."""
        return sum(sender.num_bytes for sender in self._senders)


def make_links(groups: ProcessGroups, position: int, rank_of_stage: Sequence[int], device: torch.device) -> Links:
    """Channels of the rank at ``position`` in the pipeline for stages placed so."""
    ranks, control = groups.ranks, groups.control
    pairs = {(a, b) for a, b in pairwise(rank_of_stage) if a != b}  # (from, to) in the forward direction
    lines = connect(
        control,
        position,
        [line for a, b in pairs for line in ((a, b, FORWARD_CHANNEL), (b, a, BACKWARD_CHANNEL))],
        device,
    )
    after = sorted(b for a, b in pairs if a == position)
    before = sorted(a for a, b in pairs if b == position)
    forward, backward = groups.forward, groups.backward

    def sender(peer: int, channel: int, data: dist.ProcessGroup) -> Sender:
        return Sender(ranks[peer], channel, data, control, lines.get((position, peer, channel)))

    def receiver(peer: int, channel: int, data: dist.ProcessGroup) -> Receiver:
        return Receiver(ranks[peer], channel, data, control, device, lines.get((peer, position, channel)))

    return Links(
        {peer: sender(peer, FORWARD_CHANNEL, forward) for peer in after},
        {peer: receiver(peer, FORWARD_CHANNEL, forward) for peer in before},
        {peer: sender(peer, BACKWARD_CHANNEL, backward) for peer in before},
        {peer: receiver(peer, BACKWARD_CHANNEL, backward) for peer in after},
    )


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
        homes, last_stage = schedule.rank_of_stage, schedule.num_stages - 1
        values: dict[tuple[int, int], Packet] = {}  # (stage, micro-batch) -> its input, handed over in this rank
        gradients: dict[tuple[int, int], Packet] = {}
        self._expect(schedule, rank, "train")
        for op in operations:
            start = time.perf_counter()
            stage, m = self._stages[op.stage], op.micro_batch
            finish = ending if op.stage == last_stage else None
            if op.kind is OperationKind.FORWARD:
                packet = self._input(op, micro_batches, values, homes)
                start = time.perf_counter()
                output = stage.forward(m, packet, (op.stage, m) not in kept, counters, finish)
                if finish is not None:
                    (loss,) = output.tensors
                    assert loss is not None
                    trace.losses[m] = loss
                else:
                    self._pass_on(op, output, values, "train", homes)
            elif op.kind is OperationKind.REMATERIALIZE:
                stage.rematerialize(m, counters, finish)
            elif op.kind is OperationKind.WEIGHTS:
                stage.weight_gradients(m)
            else:
                if finish is not None:
                    loss = trace.losses[m]
                    received = Packet((torch.full_like(loss, weights[m]),), False, (False,))
                elif op.stage + 1 in self._stages:
                    received = gradients.pop((op.stage, m))
                else:
                    received = self._links.receive_gradients[homes[op.stage + 1]].receive()
                start = time.perf_counter()
                result = stage.backward(m, received.tensors)
                if op.stage - 1 in self._stages:
                    gradients[(op.stage - 1, m)] = result
                elif op.stage > 0:
                    self._links.send_gradients[homes[op.stage - 1]].send(("train", op.stage - 1, m), result)
            self._links.reap()
            trace.events.append(Event(op, start, time.perf_counter()))
        return trace

    def evaluate(
        self, schedule: Schedule, rank: int, micro_batches: Sequence[Value | None], counters: Counters
    ) -> StepTrace:
        """Forward passes only; the last stage's outputs are in the trace."""
        trace = StepTrace()
        operations, homes = schedule.operations[rank], schedule.rank_of_stage
        values: dict[tuple[int, int], Packet] = {}
        self._expect(schedule, rank, "evaluate")
        for op in operations:
            packet = self._input(op, micro_batches, values, homes)
            output = self._stages[op.stage].evaluate(op.micro_batch, packet, counters)
            if op.stage == schedule.num_stages - 1:
                trace.outputs[op.micro_batch] = output
            else:
                self._pass_on(op, output, values, "evaluate", homes)
            self._links.reap()
        return trace

    def _expect(self, schedule: Schedule, rank: int, mode: str) -> None:
        for links, kind in (
            (self._links.receive_values, OperationKind.FORWARD),
            (self._links.receive_gradients, OperationKind.BACKWARD),
        ):
            for peer, receiver in links.items():
                receiver.expect([(mode, *message) for message in messages(schedule, peer, rank, kind)])

    def _input(
        self,
        op: Operation,
        micro_batches: Sequence[Value | None],
        values: dict[tuple[int, int], Packet],
        homes: Sequence[int],
    ) -> Packet:
        if op.stage == 0:
            value = micro_batches[op.micro_batch]
            if value is None:
                return EMPTY
            tensors, is_tuple = flatten(value, "the mini-batch")
            return Packet(tensors, is_tuple, (False,) * len(tensors))
        if op.stage - 1 in self._stages:
            return values.pop((op.stage, op.micro_batch))
        return self._links.receive_values[homes[op.stage - 1]].receive()

    def _pass_on(
        self,
        op: Operation,
        output: Packet,
        values: dict[tuple[int, int], Packet],
        mode: str,
        homes: Sequence[int],
    ) -> None:
        if op.stage + 1 in self._stages:
            values[(op.stage + 1, op.micro_batch)] = output
        else:
            self._links.send_values[homes[op.stage + 1]].send((mode, op.stage + 1, op.micro_batch), output)
