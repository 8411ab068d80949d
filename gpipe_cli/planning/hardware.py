"""One accelerator as five numbers, and what an operation costs on it: the roofline (Williams et al. 2009).

An operation takes as long as its arithmetic at the reached rate or its bytes at the memory's bandwidth, whichever is
longer, plus a fixed overhead. The numbers are cited in conf/hardware/; those of the CPU are measured here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_cli.pipeline.recording import Work

if TYPE_CHECKING:
    from gpipe_cli.config_plan import HardwareConfig

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """An accelerator and its link, in bytes, operations and seconds; rates are those that are reached.

    `stream_bytes_per_s` is the memory's bandwidth in plain passes, such as the optimizer's.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    stream_bytes_per_s: float
    overhead_s: float
    link_bytes_per_s: float
    link_latency_s: float
    memory_bytes: float  # what is left for the network

    def seconds(self, work: Iterable[Work], num_samples: int) -> float:
        """Time of operations one after another, for a micro-batch of `num_samples`."""
        total = 0.0
        for item in work:
            arithmetic = item.flops.at(num_samples) / self.flops_per_s
            total += self.overhead_s + max(arithmetic, item.moved_bytes.at(num_samples) / self.bytes_per_s)
        return total

    def transfer_s(self, num_bytes: float) -> float:
        """Time until `num_bytes` are on the next accelerator."""
        return self.link_latency_s + num_bytes / self.link_bytes_per_s


def described(config: HardwareConfig, precision: str) -> Hardware:
    """The hardware as its file describes it; every number must be there."""
    tflops = config.fp32_tflops if precision == "fp32" else config.bf16_tflops
    numbers = (config.memory_gb, tflops, config.memory_gb_per_s, config.op_overhead_us)
    link = (config.link_gb_per_s, config.link_latency_us)
    assert None not in (*numbers, *link), "checked with the configuration"
    memory, rate, bandwidth, overhead = (float(number or 0) for number in numbers)
    link_bandwidth, latency = (float(number or 0) for number in link)
    return Hardware(
        name=config.name,
        flops_per_s=rate * 1e12 * config.efficiency,
        bytes_per_s=bandwidth * GB,
        stream_bytes_per_s=bandwidth * GB,
        overhead_s=overhead * 1e-6,
        link_bytes_per_s=link_bandwidth * GB,
        link_latency_s=latency * 1e-6,
        memory_bytes=(memory - config.reserved_gb) * GB,
    )
