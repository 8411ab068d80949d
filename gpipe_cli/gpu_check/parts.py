"""All parts in the order in which they run: what checks comes first, what may take longest last."""

from __future__ import annotations

from gpipe_cli.gpu_check import engine, largest, precision, prediction, throughput
from gpipe_cli.gpu_check.record import Part
from gpipe_cli.gpu_check.sizes import Sizes


def all_parts(sizes: Sizes) -> tuple[Part, ...]:
    """The sections of results/gpu.md. Their times together stay below eight minutes."""
    return (engine.part(), precision.part(), largest.part(sizes), prediction.part(), throughput.part(sizes))
