"""The numbers of this machine's CPU, measured while as many processes compute as the plan has ranks.

Peaks say little about a CPU, so the rates are those of two small pieces of a network, forward and backward:
convolutions give operations per second, batch norm and pools bytes per second, by the same count that they are then
applied to. Neighbours also send each other a tensor of the size of an activation. All of it takes a second or two,
start of the processes included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from gpipe_cli.distributed.devices import RankPlan, available_cores, total_memory_bytes
from gpipe_cli.distributed.heap import keep_freed_memory
from gpipe_cli.distributed.launch import RankContext, launch
from gpipe_cli.pipeline.counting import count_network
from gpipe_cli.planning.hardware import GB, Hardware
from gpipe_cli.training.networks import sample_convolutions

if TYPE_CHECKING:
    from gpipe_cli.config_plan import HardwareConfig

MOST_RANKS = 8  # more than these tell nothing new about rates
MEASURED_S = 0.25  # for each of the numbers
LINK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Probe:
    """A piece of a network, how much it computes and moves in both passes, and in how many operations."""

    shape: tuple[int, int, int, int]
    flops: float
    moved_bytes: float
    num_operations: int


@dataclass(frozen=True)
class Rates:
    """Operations and bytes per second of one rank, seconds of an empty operation, bytes per second between ranks.

    `stream_bytes_per_s`: in plain passes over large tensors, such as the optimizer's.
    """

    flops_per_s: float
    bytes_per_s: float
    stream_bytes_per_s: float
    overhead_s: float
    link_bytes_per_s: float
    link_latency_s: float


def measured(config: HardwareConfig, precision: str, num_ranks: int, num_threads: int | None) -> Hardware:
    """This machine as `num_ranks` accelerators that share its memory and, unless `num_threads` says how, its cores."""
    rates = measure(num_ranks, precision, num_threads or threads_of_rank(num_ranks))
    tflops = config.fp32_tflops if precision == "fp32" else config.bf16_tflops
    memory = config.memory_gb * GB if config.memory_gb is not None else total_memory_bytes() / num_ranks
    return Hardware(
        name=config.name,
        flops_per_s=(rates.flops_per_s if tflops is None else tflops * 1e12) * config.efficiency,
        bytes_per_s=rates.bytes_per_s if config.memory_gb_per_s is None else config.memory_gb_per_s * GB,
        stream_bytes_per_s=rates.stream_bytes_per_s if config.memory_gb_per_s is None else config.memory_gb_per_s * GB,
        overhead_s=rates.overhead_s if config.op_overhead_us is None else config.op_overhead_us * 1e-6,
        link_bytes_per_s=rates.link_bytes_per_s if config.link_gb_per_s is None else config.link_gb_per_s * GB,
        link_latency_s=rates.link_latency_s if config.link_latency_us is None else config.link_latency_us * 1e-6,
        memory_bytes=memory - config.reserved_gb * GB,
    )


def threads_of_rank(num_ranks: int) -> int:
    """The threads that gpipe train gives each rank where nothing is said."""
    return max(1, available_cores() // num_ranks)


def cpu_ranks(num_ranks: int, num_threads: int) -> RankPlan:
    """Processes on this machine's cores, to measure with."""
    return RankPlan(
        num_ranks=num_ranks, num_threads=num_threads, device_type="cpu", backend="gloo", start_method="fork"
    )


def measure(num_ranks: int, precision: str, num_threads: int) -> Rates:
    """Rates of one of `num_ranks` ranks that compute at the same time; more threads than cores share them."""
    cores = available_cores()
    num_processes = min(num_ranks, cores, MOST_RANKS)
    plan = cpu_ranks(num_processes, num_threads)
    probes = Probes(_probe(sample_convolutions(), (4, 64, 28, 28)), _probe(_memory_bound(), (4, 64, 56, 56)), precision)
    rates = launch(_measure_rank, probes, plan)
    share = min(1.0, max(cores, num_processes * num_threads) / (num_ranks * num_threads))
    return Rates(
        rates.flops_per_s * share,
        rates.bytes_per_s * share,
        rates.stream_bytes_per_s * share,
        rates.overhead_s / share,
        rates.link_bytes_per_s,
        rates.link_latency_s,
    )


@dataclass(frozen=True)
class Probes:
    """What every rank times."""

    convolutions: Probe
    memory_bound: Probe
    precision: str


def _memory_bound() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1))


def _probe(layers: nn.Sequential, shape: tuple[int, int, int, int]) -> Probe:
    counted = count_network(layers, torch.empty(1, *shape[1:], device="meta"))
    work = [item for count in counted.layers for item in (*count.forward, *count.backward)]
    return Probe(
        shape,
        sum(item.flops.at(shape[0]) for item in work),
        sum(item.moved_bytes.at(shape[0]) for item in work),
        len(work),
    )


def _measure_rank(context: RankContext, probes: Probes) -> Rates:
    keep_freed_memory()  # as processes that train do
    several = context.world_size > 1
    tiny, large, other = torch.zeros(1), torch.zeros(4 * 2**20), torch.ones(4 * 2**20)  # 16 MB: beyond most caches
    if several:
        dist.barrier()
    # An operation of a network also makes its node of the graph and passes through its module.
    overhead = 3 * _time(lambda: torch.add(tiny, 1.0))
    convolutions = _passes_s(sample_convolutions(), probes.convolutions, probes.precision)
    memory_bound = _passes_s(_memory_bound(), probes.memory_bound, "fp32")
    stream = _time(lambda: large.add_(other))
    link, latency = (_link(context), _link(context, 4)) if several else (0.0, 0.0)
    return Rates(
        probes.convolutions.flops / max(convolutions - probes.convolutions.num_operations * overhead, 1e-9),
        probes.memory_bound.moved_bytes / max(memory_bound - probes.memory_bound.num_operations * overhead, 1e-9),
        3 * large.nbytes / stream,
        overhead,
        LINK_BYTES / max(link - latency, 1e-9) if several else float("inf"),
        latency,
    )


def _passes_s(layers: nn.Sequential, probe: Probe, precision: str) -> float:
    """Seconds of both passes, channels-last."""
    layers.to(memory_format=torch.channels_last)
    images = torch.randn(probe.shape).contiguous(memory_format=torch.channels_last).requires_grad_()

    def both() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            out = layers(images)
        out.backward(torch.ones_like(out))

    return _time(both)


def _time(work: Callable[[], object]) -> float:
    """Median seconds of `work`, over MEASURED_S."""
    work()
    seconds: list[float] = []
    end = time.perf_counter() + MEASURED_S
    while time.perf_counter() < end or len(seconds) < 3:
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _link(context: RankContext, num_bytes: int = LINK_BYTES) -> float:
    """Seconds of a tensor's way from a rank to the next, from its way there and back; other pairs do the same."""
    buffer = torch.zeros(num_bytes // 4)
    peer = context.rank ^ 1
    seconds = []
    for _ in range(8):
        if peer >= context.world_size:
            break
        began = time.perf_counter()
        if context.rank < peer:
            dist.send(buffer, peer)
            dist.recv(buffer, peer)
        else:
            dist.recv(buffer, peer)
            dist.send(buffer, peer)
        seconds.append((time.perf_counter() - began) / 2)
    dist.barrier()
    return statistics.median(seconds) if seconds else 0.0
