"""Tensors between ranks: any number, any dtype, any layout, shapes that change, gradients that are missing.

Between processes of one machine that compute on CPUs messages go through shared memory (see there), given a line. Else
a message is a fixed-size header over the control group (Gloo, host memory) and one payload per tensor over the data
group (NCCL on GPUs, Gloo on CPUs). Receives are posted ahead: headers always, payloads by prediction, because the same
micro-batch of the next step nearly always has the same shapes. When a prediction fails, the sender, who keeps the same
record as the receiver, first satisfies the payloads that were posted and then sends the real ones over the control
group. Nothing blocks the sender. Layout is kept: a dense tensor's memory travels as it lies, so channels-last stays
channels-last.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from socket import socket
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .shared_memory import SharedMemoryReceiver, SharedMemorySender

HEADER_LENGTH = 256  # 64-bit integers: about ten tensors of four dimensions; longer headers take a second message
LOOKAHEAD = 2  # messages whose receives are posted before they are needed

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


@dataclass(frozen=True)
class Packet:
    """What crosses a boundary: tensors (None where a gradient is missing), whether they form a tuple, which need
    gradients.

    ``tensors`` is empty for a micro-batch without samples.
    """

    tensors: tuple[Tensor | None, ...]
    is_tuple: bool
    requires_grad: tuple[bool, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the micro-batch has no samples (an evaluation with fewer samples than micro-batches)."""
        return not self.tensors


EMPTY = Packet((), False, ())


@dataclass(frozen=True)
class _Layout:
    """All that a receiver needs to make room for a tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups of one pipeline; ``ranks`` are the global ranks in the order of their stages."""

    ranks: tuple[int, ...]
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    control: dist.ProcessGroup
    collective: dist.ProcessGroup


def make_process_groups(pipelines: Sequence[Sequence[int]]) -> ProcessGroups:
    """Groups for every pipeline (one per replica); collective over all ranks. Returns those of the calling rank."""
    own: ProcessGroups | None = None
    for ranks in pipelines:
        members = list(ranks)
        # Every rank of the world takes part in making every group, its own or not.
        forward, backward, control, collective = (
            cast(dist.ProcessGroup, dist.new_group(members, backend=backend)) for backend in (None, None, "gloo", None)
        )
        if dist.get_rank() in members:
            own = ProcessGroups(tuple(members), forward, backward, control, collective)
    assert own is not None, "every rank belongs to a pipeline"
    return own


def open_connections(
    groups: ProcessGroups, position: int, pairs: Iterable[tuple[int, int]], device: torch.device
) -> None:
    """Use the connections of all ``pairs`` of positions once, in one order. Collective over the pipeline.

    NCCL makes the connection of two ranks in a group when it is first used, and holds up the first until the other
    comes. In the middle of a step two ranks could so wait for each other, each in another group.
    """
    for first, second in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
        for group in (groups.forward, groups.backward):
            token = torch.zeros(1, device=device)
            if position == first:
                dist.send(token, dst=groups.ranks[second], group=group)
            elif position == second:
                dist.recv(token, src=groups.ranks[first], group=group)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor itself if its memory has neither gaps nor overlaps, otherwise a copy in the nearest such layout."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)


def _memory(tensor: Tensor) -> Tensor:
    """A dense tensor's memory as a contiguous vector, without copying."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _encode(packet: Packet) -> tuple[list[int], tuple[_Layout | None, ...]]:
    numbers = [len(packet.tensors), int(packet.is_tuple)]
    layouts: list[_Layout | None] = []
    for tensor, requires_grad in zip(packet.tensors, packet.requires_grad, strict=True):
        if tensor is None:
            numbers.append(-1)
            layouts.append(None)
            continue
        layout = _Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        layouts.append(layout)
        numbers += [DTYPES.index(tensor.dtype), int(requires_grad), tensor.dim(), *layout.size, *layout.stride]
    return numbers, tuple(layouts)


def _decode(numbers: list[int]) -> tuple[bool, tuple[bool, ...], tuple[_Layout | None, ...]]:
    values = iter(numbers)
    num_tensors, is_tuple = next(values), bool(next(values))
    flags: list[bool] = []
    layouts: list[_Layout | None] = []
    for _ in range(num_tensors):
        code = next(values)
        if code < 0:
            flags.append(False)
            layouts.append(None)
            continue
        flags.append(bool(next(values)))
        dim = next(values)
        size = tuple(next(values) for _ in range(dim))
        layouts.append(_Layout(DTYPES[code], size, tuple(next(values) for _ in range(dim))))
    return is_tuple, tuple(flags), tuple(layouts)


class _Channel:
    """One direction between two ranks for one purpose; ``number`` keeps its messages apart from other channels'."""

    def __init__(self, peer: int, number: int, data: dist.ProcessGroup, control: dist.ProcessGroup) -> None:
        self.peer, self.data, self.control = peer, data, control
        self.tag_header, self.tag_rest, self.tag_payload, self.tag_late = range(4 * number, 4 * number + 4)
        # Both ends keep the same record: key -> layouts of the last message under that key.
        self.predicted: dict[Hashable, tuple[_Layout | None, ...]] = {}


class Sender:
    """Sends packets without waiting; over ``line`` where there is one."""

    def __init__(
        self,
        peer: int,
        number: int,
        data: dist.ProcessGroup,
        control: dist.ProcessGroup,
        line: socket | None = None,
    ) -> None:
        self._shared = None if line is None else SharedMemorySender(line)
        self._channel = _Channel(peer, number, data, control)
        self._pending: deque[tuple[Any, Tensor]] = deque()
        self.num_bytes = 0

    def send(self, key: Hashable, packet: Packet) -> None:
        """Queue a packet; ``key`` says which earlier message probably had the same shapes."""
        channel = self._channel
        packet = Packet(
            tuple(None if t is None else _dense(t.detach()) for t in packet.tensors),
            packet.is_tuple,
            packet.requires_grad,
        )
        numbers, layouts = _encode(packet)
        if self._shared is not None:
            tensors = [_memory(tensor) for tensor in packet.tensors if tensor is not None and tensor.numel()]
            self._shared.send(numbers, tensors)
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
            return
        header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
        header[0] = len(numbers)
        inline = numbers[: HEADER_LENGTH - 1]
        header[1 : 1 + len(inline)] = torch.tensor(inline)
        self._start(header, channel.control, channel.tag_header)
        if len(numbers) > len(inline):
            self._start(torch.tensor(numbers[len(inline) :]), channel.control, channel.tag_rest)
        predicted = channel.predicted.get(key, ())
        if predicted == layouts:
            for tensor in packet.tensors:
                if tensor is not None and tensor.numel():
                    self._start(_memory(tensor), channel.data, channel.tag_payload)
                    self.num_bytes += tensor.nbytes
        else:
            device = next((t.device for t in packet.tensors if t is not None), torch.device("cpu"))
            for layout in predicted:
                if layout is not None and 0 not in layout.size:
                    self._start(_memory(layout.allocate(device).zero_()), channel.data, channel.tag_payload)
            for tensor in packet.tensors:
                if tensor is not None and tensor.numel():
                    self._start(_memory(tensor).cpu(), channel.control, channel.tag_late)
                    self.num_bytes += tensor.nbytes
        channel.predicted[key] = layouts
        self.reap()

    def _start(self, tensor: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        # A boolean vector travels as bytes; the memory is the same.
        work = dist.isend(_as_bytes(tensor), dst=self._channel.peer, group=group, tag=tag)
        self._pending.append((work, tensor))

    def reap(self) -> None:
        """Let go of the tensors that have left."""
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._pending:
            self._pending.popleft()[0].wait()


@dataclass
class _Posted:
    key: Hashable
    header: Tensor
    header_work: Any
    layouts: tuple[_Layout | None, ...]
    buffers: list[Tensor | None]
    works: list[Any]


class Receiver:
    """Receives the packets of a step in a known order, with receives posted ahead; over ``line`` where there is one."""

    def __init__(
        self,
        peer: int,
        number: int,
        data: dist.ProcessGroup,
        control: dist.ProcessGroup,
        device: torch.device,
        line: socket | None = None,
    ) -> None:
        self._shared = None if line is None else SharedMemoryReceiver(line)
        self._channel = _Channel(peer, number, data, control)
        self._device = device
        self._expected: deque[Hashable] = deque()
        self._posted: deque[_Posted] = deque()
        self.wait_s = 0.0

    def expect(self, keys: Sequence[Hashable]) -> None:
        """Announce the keys of the coming messages, in order, and post the first receives."""
        if self._shared is not None:
            return
        self._expected.extend(keys)
        self._post_ahead()

    def receive(self) -> Packet:
        """The next packet; waits for it. ``wait_s`` sums the seconds spent so."""
        began = time.perf_counter()
        packet = self._receive_posted() if self._shared is None else self._receive_shared(self._shared)
        self.wait_s += time.perf_counter() - began
        return packet

    def _receive_shared(self, shared: SharedMemoryReceiver) -> Packet:
        is_tuple, flags, layouts = _decode(shared.receive())
        buffers = [None if layout is None else layout.allocate(self._device) for layout in layouts]
        shared.read_into([_memory(buffer) for buffer in buffers if buffer is not None and buffer.numel()])
        return Packet(tuple(buffers), is_tuple, flags)

    def _receive_posted(self) -> Packet:
        posted = self._posted.popleft()
        posted.header_work.wait()
        channel = self._channel
        length = int(posted.header[0])
        numbers = posted.header[1 : 1 + min(length, HEADER_LENGTH - 1)].tolist()
        if length > len(numbers):
            rest = torch.empty(length - len(numbers), dtype=torch.int64)
            dist.recv(rest, src=channel.peer, group=channel.control, tag=channel.tag_rest)
            numbers += rest.tolist()
        is_tuple, flags, layouts = _decode(numbers)
        for work in posted.works:
            work.wait()
        buffers = posted.buffers
        if layouts != posted.layouts:
            buffers = []
            for layout in layouts:
                buffer = None if layout is None else layout.allocate(torch.device("cpu"))
                if buffer is not None and buffer.numel():
                    dist.recv(_as_bytes(_memory(buffer)), src=channel.peer, group=channel.control, tag=channel.tag_late)
                buffers.append(None if buffer is None else buffer.to(self._device))
        channel.predicted[posted.key] = layouts
        self._post_ahead()
        return Packet(tuple(buffers), is_tuple, flags)

    def _post_ahead(self) -> None:
        channel = self._channel
        while self._expected and len(self._posted) < LOOKAHEAD:
            key = self._expected.popleft()
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
            work = dist.irecv(header, src=channel.peer, group=channel.control, tag=channel.tag_header)
            layouts = channel.predicted.get(key, ())
            buffers = [None if layout is None else layout.allocate(self._device) for layout in layouts]
            works = [
                dist.irecv(_as_bytes(_memory(buffer)), src=channel.peer, group=channel.data, tag=channel.tag_payload)
                for buffer in buffers
                if buffer is not None and buffer.numel()
            ]
            self._posted.append(_Posted(key, header, work, layouts, buffers, works))


def _as_bytes(vector: Tensor) -> Tensor:
    """Types that a backend may not know travel as bytes; the memory is the same."""
    return vector.view(torch.uint8) if vector.dtype in (torch.bool, torch.bfloat16, torch.int16) else vector
