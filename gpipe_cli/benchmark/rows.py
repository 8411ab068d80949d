"""A result as rows of the tables in results/."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.tables import KIND, MEASURED, Row
from gpipe_cli.reporting.throughput import per_rank

if TYPE_CHECKING:
    from gpipe_cli.benchmark.grid import Case
    from gpipe_cli.benchmark.results import Comparison, Result
    from gpipe_cli.config import ModelConfig
    from gpipe_cli.config_bench import BenchConfig


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where and how the rows of a bench come about."""

    machine: str
    command_line: str


# Of a configuration, what follows from the rest of it.
_NOT_ITS_OWN = ("balance", "kept", "name")


def _configuration(config: BenchConfig, case: Case) -> str:
    """Ten hexadecimal digits: the same for rows of which a new one takes an old one's place."""
    of_case = {name: value for name, value in dataclasses.asdict(case).items() if name not in _NOT_ITS_OWN}
    if not case.taper:
        del of_case["taper"]  # rows from before there was such a setting keep their places
    settings: dict[str, Any] = {
        **of_case,
        "balance": config.balance,
        "cut": config.cut,
        "optimizer": dataclasses.asdict(config.optimizer),
        "precision": config.precision,
        "device": config.device,
        "threads": config.threads,
        "ranks": config.ranks,
        "channels_last": config.channels_last,
        "memory_gb": config.memory_gb,
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def network_name(model: ModelConfig) -> str:
    """What the network is called in tables: the user's function for his own layers."""
    return f"amoebanet-{model.variant}" if model.name == "amoebanet" else model.factory or model.name


def _common(config: BenchConfig, result: Result, origin: Origin) -> dict[str, Any]:
    case, ready = result.case, result.ready
    amoebanet, transformer = case.model.name == "amoebanet", case.model.name == "transformer"
    return {
        "model": network_name(case.model),
        "variant": case.model.variant if amoebanet else None,
        "layers": case.model.layers if amoebanet or transformer else None,
        "filters": case.model.filters if amoebanet else None,
        "num_parameters": ready.num_parameters if ready is not None else None,
        "image_size": case.image_size,
        "seq_len": case.seq_len,
        "batch_size": case.batch_size,
        "partitions": case.partitions,
        "micro_batches": case.micro_batches,
        "remat": case.remat,
        "kept": per_rank(ready.kept) if ready is not None else None,
        "schedule": case.schedule,
        "taper": "tapered" if case.taper else None,
        "baseline": case.baseline,
        "balance": per_rank(ready.balance) if ready is not None else None,
        "precision": config.precision,
        "device": ready.device if ready is not None else None,
        "world_size": ready.world_size if ready is not None else None,
        "threads": ready.num_threads if ready is not None else None,
        "layout": shown_layout(case, ready.layout) if ready is not None else None,
        "optimizer": config.optimizer.name,
        KIND: MEASURED,
        "machine": origin.machine,
        "date": time.strftime("%Y-%m-%d"),
        "command_line": origin.command_line,
        "configuration": _configuration(config, case),
    }


def shown_layout(case: Case, layout: str) -> str | None:
    """The memory format of pictures in a configuration; torch's pipeline has channels-last inside its stages only."""
    if case.seq_len is not None:
        return None
    return f"{layout} inside" if case.baseline == "torch" and layout == "channels-last" else layout


def throughput_row(config: BenchConfig, result: Result, comparison: Comparison, origin: Origin) -> Row:
    """The row of results/throughput of a configuration that was measured."""
    spread, bubbles = result.spread, result.bubble_per_rank
    return {
        **_common(config, result, origin),
        "samples_per_s": round(result.samples_per_s, 4),
        "tokens_per_s": _rounded(result.tokens_per_s),
        "step_time_s": round(spread.median_s, 6),
        "step_time_low_s": round(spread.low_s, 6),
        "step_time_high_s": round(spread.high_s, 6),
        "bubble_fraction": None if bubbles is None else round(sum(bubbles) / len(bubbles), 4),
        "bubble_fraction_per_rank": None if bubbles is None else per_rank(round(share, 4) for share in bubbles),
        "num_bytes_sent_per_rank": per_rank(result.num_bytes_sent_per_rank),
        "num_rematerializations": result.num_rematerializations,
        "ratio_single": _rounded(comparison.single),
        "ratio_naive": _rounded(comparison.naive),
        "ratio_torch": _rounded(comparison.torch),
        "speedup": _rounded(comparison.speedup),
        "speedup_over": comparison.over,
        "warmup_steps": config.warmup_steps,
        "steps": len(result.step_times_s),
        "rounds": config.rounds,
    }


def memory_row(config: BenchConfig, result: Result, origin: Origin) -> Row:
    """The row of results/memory of a configuration that was measured, or for which the memory was too small."""
    row = {**_common(config, result, origin), "name": result.case.name}
    if result.end is None:
        return {**row, "outcome": "out of memory"}
    activations = [count for count in result.end.activation_bytes if count is not None]
    known = len(activations) == len(result.end.activation_bytes)
    return {
        **row,
        "parameter_memory_bytes": result.end.parameter_memory_bytes,
        "activation_bytes": sum(activations) if known else None,
        "activation_bytes_per_rank": per_rank(result.end.activation_bytes),
        "peak_memory_bytes_per_rank": per_rank(result.end.peak_memory_bytes),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
