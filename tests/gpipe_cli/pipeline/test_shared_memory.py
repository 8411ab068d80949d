"""Messages through shared memory arrive as they were sent, and the end of either process is noticed."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpipe_cli.pipeline import shared_memory
from gpipe_cli.pipeline.shared_memory import SharedMemoryReceiver, SharedMemorySender, connect
from gpipe_cli.pipeline.transport import Packet, Receiver, Sender, make_process_groups

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory without names is Linux's")


@pytest.fixture
def line():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


TENSORS = [
    torch.randn(5, 3), torch.randn(7, dtype=torch.float64), torch.arange(9), torch.tensor([True, False, True]),
    torch.randn(4).bfloat16(), torch.tensor([1 + 2j, 3 - 4j]), torch.randn(100_000), torch.tensor(3.5),
]  # fmt: skip


def vectors(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.reshape(-1) for tensor in tensors]


def test_numbers_and_tensors_of_every_type_arrive_in_order(line):
    sender, receiver = SharedMemorySender(line[0]), SharedMemoryReceiver(line[1])
    sender.send([3, -1, 2**62], vectors(TENSORS))
    sender.send([], [])
    sender.send(list(range(10_000)), [])
    assert receiver.receive() == [3, -1, 2**62]
    made = vectors([torch.empty_like(tensor) for tensor in TENSORS])
    receiver.read_into(made)
    assert all(torch.equal(a, b) for a, b in zip(made, vectors(TENSORS), strict=True))
    assert receiver.receive() == []
    receiver.read_into([])
    assert receiver.receive() == list(range(10_000))


def test_the_sender_may_change_its_tensor_at_once_and_go_ahead_of_the_receiver(line):
    sender, receiver = SharedMemorySender(line[0]), SharedMemoryReceiver(line[1])
    value, made = torch.zeros(20_000), torch.empty(20_000)
    for number in range(50):
        sender.send([number], [value.fill_(number)])
    for number in range(50):
        assert receiver.receive() == [number]
        receiver.read_into([made])
        assert torch.equal(made, torch.full_like(made, number))


def test_blocks_are_used_again(line):
    sender, receiver = SharedMemorySender(line[0]), SharedMemoryReceiver(line[1])
    files = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        value = torch.full((1000 * (1 + number % 4),), float(number))
        sender.send([number], [value])
        receiver.receive()
        made = torch.empty_like(value)
        receiver.read_into([made])
        assert torch.equal(made, value)
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert sum("memfd:gpipe" in row for row in maps) == 2  # one block, mapped at both ends
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # what mmap keeps open of it


def test_the_end_of_the_other_process_is_said_as_gloo_says_it(line):
    sender, receiver = SharedMemorySender(line[0]), SharedMemoryReceiver(line[1])
    sender.send([0], [torch.ones(3)])
    sender.send([1], [torch.ones(3)])
    assert receiver.receive() == [0]
    receiver.read_into([torch.empty(3)])  # the answer to this is never read
    line[0].close()
    assert receiver.receive() == [1]  # what was sent before counts
    receiver.read_into([torch.empty(3)])
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        receiver.receive()
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ends[0]:
        ends[1].close()
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            SharedMemorySender(ends[0]).send([1], [])


def exchange(on_gpu: bool = False, place: str | None = "as it is") -> dict[str, Any]:
    """Runs in two ranks: which lines there are, and what a packet becomes on its way there and back."""
    groups = make_process_groups([[0, 1]])
    rank = dist.get_rank()
    if place != "as it is":
        shared_memory._place = lambda: place if rank else "elsewhere"
    lines = connect(groups.control, rank, [(0, 1, 0), (1, 0, 1)], torch.device("cuda" if on_gpu else "cpu"))
    ends = (1 - rank, rank, groups.forward, groups.control)
    sender = Sender(*ends, lines.get((rank, 1 - rank, rank)))
    ends = (1 - rank, 1 - rank, *ends[2:])
    receiver = Receiver(*ends, torch.device("cpu"), lines.get((1 - rank, rank, 1 - rank)))
    receiver.expect(["a", "b"])
    picture = torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last)
    got = []
    for key in ("a", "b"):
        tensors = (picture + rank, None, torch.zeros(0, 3), picture[:, :, ::2])
        sender.send(key, Packet(tensors, True, (True, False, False, True)))
        packet = receiver.receive()
        first, missing, empty, part = packet.tensors
        got.append((first.stride() == picture.stride(), float(first.sum() - picture.sum()), missing, empty.shape))
        got.append((torch.equal(part, picture[:, :, ::2]), packet.is_tuple, packet.requires_grad))
    sender.flush()
    dist.barrier()
    return {"lines": sorted(lines), "got": got, "num_bytes": sender.num_bytes}


def test_packets_are_the_same_with_and_without_shared_memory(run_ranks):
    shared, gloo = run_ranks(2, exchange), run_ranks(2, exchange, False, None)
    for rank in range(2):
        assert shared[rank]["lines"] == [(0, 1, 0), (1, 0, 1)]
        assert gloo[rank]["lines"] == []
        assert shared[rank]["got"] == gloo[rank]["got"]
        assert shared[rank]["got"][0] == (True, 48.0 * (1 - rank), None, torch.Size([0, 3]))
        assert shared[rank]["num_bytes"] == gloo[rank]["num_bytes"]


def test_other_machines_and_gpus_have_none(run_ranks):
    assert [found["lines"] for found in run_ranks(2, exchange, False, "there")] == [[], []]
    assert [found["lines"] for found in run_ranks(2, exchange, True)] == [[], []]
