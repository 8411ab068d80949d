"""Tensors between two processes of one machine, through memory that both have mapped.

Over Gloo's loopback connection a message costs each end system calls, a copy in the kernel and a thread that wakes up:
half a millisecond for 0.3 MB, three for 3 MB where both processes compute (two AMD EPYC cores in a virtual machine).
Here the sender copies tensors into a block of memory and says over a Unix socket which one; the receiver copies them
out and says that the block is free. Nothing blocks the sender: without a free block it makes another. Blocks have no
names and sockets no files, so a process that is killed leaves nothing behind, and its end closes the sockets, which
tells the other process. The sockets' system calls also order what the two do to the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

# A message: block, its bytes if it is new (its file comes along), how many numbers stand at its beginning.
_MESSAGE = struct.Struct("3q")
_HELLO = struct.Struct("2q")  # who connects (position), and for which channel
_ALIGNMENT = 64  # bytes: a cache line, and enough for every type
_BLOCK_STEP = 2**16  # blocks are multiples of this, so that those of nearly the same size can be used again
_LIMIT_S = 1800  # as long as Gloo waits for a peer

Line = tuple[int, int, int]  # from position, to position, channel


def connect(
    control: dist.ProcessGroup, position: int, lines: Iterable[Line], device: torch.device
) -> dict[Line, socket.socket]:
    """A socket for each of the ``lines`` that this process is an end of and that stays on one machine. Collective.

    None for tensors on GPUs, and where the system has no such memory (all but Linux). Raises RuntimeError when a
    process does not come.
    """
    place = _place() if device.type == "cpu" else None
    name = f"\0gpipe-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if place else _NoListener() as listener:
        if place:
            listener.bind(name)
            listener.listen(socket.SOMAXCONN)
            listener.settimeout(_LIMIT_S)
        told: list[tuple[int, str | None, str] | None] = [None] * dist.get_world_size(control)
        dist.all_gather_object(told, (position, place, name), group=control)
        others = {entry[0]: entry[1:] for entry in told if entry is not None}
        local = [line for line in sorted(lines) if place and others[line[0]][0] == others[line[1]][0] == place]
        found: dict[Line, socket.socket] = {}
        for line in local:
            if line[0] == position:
                found[line] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.connect(others[line[1]][1])
                connection.send(_HELLO.pack(position, line[2]))
        expected = {line for line in local if line[1] == position}
        while expected - found.keys():
            arrived, connection = _accept(listener, position)
            if arrived in expected:
                found[arrived] = connection
    return found


def _accept(listener: socket.socket, position: int) -> tuple[Line | None, socket.socket]:
    """The next connection, and which line it is; None for one that no process of this user has made."""
    try:
        connection, _ = listener.accept()
    except TimeoutError as error:
        raise RuntimeError("timed out waiting for another rank's connection") from error
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.getuid():
        connection.close()
        return None, connection
    sender, channel = _HELLO.unpack(connection.recv(_HELLO.size))
    return (sender, position, channel), connection


class _NoListener:
    """Stands where nothing can be listened to."""

    def __enter__(self) -> socket.socket:
        return None  # type: ignore[return-value]

    def __exit__(self, *problem: object) -> None: ...


def _place() -> str | None:
    """Where sockets without files reach each other, and memory can be shared: the same text for processes that can do
    both; None where neither is there."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        os.close(os.memfd_create("gpipe"))
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return None


@dataclass
class _Block:
    memory: mmap.mmap
    bytes: Tensor = field(init=False)  # all of it, uint8

    def __post_init__(self) -> None:
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)


class SharedMemorySender:
    """The sending end of a line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._blocks: list[_Block] = []
        self._free: list[int] = []  # the last one that became free at the end: its memory is still in the caches

    def send(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Send whole numbers of 64 bits and the bytes of contiguous vectors, in order.

        Raises RuntimeError when the other process is gone.
        """
        head = array("q", numbers).tobytes()
        offsets, end = _offsets(len(head), tensors)
        try:
            self._collect()
            number, new_bytes, files = self._block_of(end)
            try:
                block = self._blocks[number]
                block.memory[: len(head)] = head
                for offset, tensor in zip(offsets, tensors, strict=True):
                    block.bytes[offset : offset + tensor.nbytes].copy_(tensor.view(torch.uint8))
                socket.send_fds(self._line, [_MESSAGE.pack(number, new_bytes, len(numbers))], files)
            finally:
                for file in files:
                    os.close(file)
        except ConnectionError as error:
            raise RuntimeError(f"connection closed by peer ({error.strerror})") from error

    def _block_of(self, num_bytes: int) -> tuple[int, int, list[int]]:
        """A block with so much room: its number, its bytes if it is new (else 0) and then its file."""
        for index in reversed(range(len(self._free))):
            if len(self._blocks[self._free[index]].memory) >= num_bytes:
                return self._free.pop(index), 0, []
        size = -(-num_bytes // _BLOCK_STEP) * _BLOCK_STEP
        file = os.memfd_create("gpipe", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        self._blocks.append(_Block(mmap.mmap(file, size)))
        return len(self._blocks) - 1, size, [file]

    def _collect(self) -> None:
        """Take note of the blocks that have become free."""
        while len(self._free) < len(self._blocks):
            try:
                answer = self._line.recv(_MESSAGE.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not answer:
                raise RuntimeError("connection closed by peer")
            self._free.append(int.from_bytes(answer, "little"))


class SharedMemoryReceiver:
    """The receiving end of a line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("2l", _LIMIT_S, 0))
        self._blocks: dict[int, _Block] = {}
        self._current, self._head_bytes = 0, 0

    def receive(self) -> list[int]:
        """The numbers of the next message; waits for it. Its tensors are read next.

        Raises RuntimeError when the other process is gone or silent.
        """
        try:
            try:
                message, files, _, _ = socket.recv_fds(self._line, _MESSAGE.size, 1)
            except ConnectionResetError:
                # The sender has ended without having read all answers: Linux says so once, before what it sent.
                message, files, _, _ = socket.recv_fds(self._line, _MESSAGE.size, 1)
        except BlockingIOError as error:
            raise RuntimeError(f"timed out waiting for another rank ({_LIMIT_S} s)") from error
        except ConnectionError as error:
            raise RuntimeError(f"connection closed by peer ({error.strerror})") from error
        if not message:
            raise RuntimeError("connection closed by peer")
        self._current, new_bytes, count = _MESSAGE.unpack(message)
        for file in files:
            self._blocks[self._current] = _Block(mmap.mmap(file, new_bytes))
            os.close(file)
        self._head_bytes = count * array("q").itemsize
        numbers = array("q")
        numbers.frombytes(self._blocks[self._current].memory[: self._head_bytes])
        return numbers.tolist()

    def read_into(self, tensors: Sequence[Tensor]) -> None:
        """Fill contiguous vectors, as many and as large as were sent, and free the message's memory."""
        block = self._blocks[self._current]
        for offset, tensor in zip(_offsets(self._head_bytes, tensors)[0], tensors, strict=True):
            tensor.view(torch.uint8).copy_(block.bytes[offset : offset + tensor.nbytes])
        with contextlib.suppress(ConnectionError):  # the sender has ended after its last message
            self._line.send(self._current.to_bytes(8, "little"))


def _offsets(begin: int, tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where in a block each tensor begins, the first one after ``begin`` bytes, and where the last one ends."""
    offsets, end = [], begin
    for tensor in tensors:
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + tensor.nbytes
    return offsets, max(end, 1)
