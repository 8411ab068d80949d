"""The columns of the paper's tables as plans, with what was reported beside what is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from gpipe_cli.planning.network import make_planner
from gpipe_cli.planning.planner import Choice, Plan, Planner
from gpipe_cli.reporting.paper import (
    BYTES_PER_PARAMETER,
    CLAIM,
    TABLE1,
    TABLE2,
    TABLE3,
    TORCHGPIPE,
    TORCHGPIPE_SAMPLES_PER_S,
    TRANSFORMER_BATCH_SIZE,
    TRANSFORMER_DROPOUT,
    TRANSFORMER_LAYERS,
    TRANSFORMER_SIZES,
    PaperSize,
    PaperSpeed,
)

if TYPE_CHECKING:
    from gpipe_cli.config import ModelConfig
    from gpipe_cli.config_plan import HardwareConfig, PlanConfig

FindHardware = Callable[[str], "HardwareConfig"]

# PAPER does not state the micro-batches of Table 1. 32 is the most of Table 2, and as many as the Transformer's batch
# has sequences.
TABLE1_MICRO_BATCHES = 32
TABLE1_HARDWARE = {"amoebanet": "tpu_v2", "transformer": "tpu_v3"}


@dataclass(frozen=True, kw_only=True)
class SuiteRow:
    """One column of a table: what was reported and what is predicted."""

    suite: str
    name: str
    architecture: str
    model: ModelConfig
    plan: Plan
    size: PaperSize | None = None
    speed: PaperSpeed | None = None
    relative: float | None = None


def run_suite(config: PlanConfig, find_hardware: FindHardware) -> list[SuiteRow]:
    """Every column of `config.suite`. `find_hardware` gives the hardware of a name as conf/ describes it.

    With Table 1, the largest networks, and with Table 2, the speed on TPUs, comes the announcement's largest one.
    """
    claim = _speeds(config, CLAIM, find_hardware("tpu_v3")) if config.suite in ("table1", "table2") else []
    if config.suite == "table1":
        return [*_table1(config, find_hardware), *claim]
    if config.suite == "torchgpipe":
        return _speeds(config, TORCHGPIPE, find_hardware("p40"))
    if config.suite == "table3":
        return _speeds(config, TABLE3, find_hardware("p100"))
    rows: list[SuiteRow] = []
    for architecture, hardware in TABLE1_HARDWARE.items():
        rows += _speeds(config, [row for row in TABLE2 if row.architecture == architecture], find_hardware(hardware))
    return [*rows, *claim]


def torchgpipe_samples_per_s(row: SuiteRow) -> float | None:
    """Throughput that torchgpipe reports for a row of its own suite."""
    return row.speed.relative * TORCHGPIPE_SAMPLES_PER_S if row.suite == "torchgpipe" and row.speed else None


def _table1(config: PlanConfig, find_hardware: FindHardware) -> Iterable[SuiteRow]:
    for size in TABLE1:
        batch_size = config.batch_size if size.architecture == "amoebanet" else TRANSFORMER_BATCH_SIZE
        naive = size.name.startswith("Naive")
        model = _model(config, size.architecture, size.layers, size.filters)
        planner = make_planner(
            replace(
                config,
                model=model,
                hardware=find_hardware(TABLE1_HARDWARE[size.architecture]),
                bytes_per_parameter=config.bytes_per_parameter or BYTES_PER_PARAMETER,
            )
        )
        choice = Choice(
            partitions=size.accelerators,
            micro_batches=1 if naive else TABLE1_MICRO_BATCHES,
            batch_size=batch_size,
            remat="none" if naive else "full",
            cut=config.cut,
        )
        plan = _roomier(planner, choice)
        yield SuiteRow(
            suite="table1", name=size.name, architecture=size.architecture, model=model, plan=plan, size=size
        )


def _roomier(planner: Planner, choice: Choice) -> Plan:
    """The plan, cut by memory where only so it fits: the column asks what fits, not what is fastest."""
    plan = planner.evaluate(choice)
    if plan.fits or choice.partitions == 1:
        return plan
    other = planner.evaluate(replace(choice, cut="memory"))
    return other if max(other.memory_bytes_per_rank) < max(plan.memory_bytes_per_rank) else plan


def _speeds(config: PlanConfig, speeds: Sequence[PaperSpeed], hardware: HardwareConfig) -> list[SuiteRow]:
    @cache
    def planner(architecture: str, own_layers: int | None) -> Planner:
        layers, filters = (18, 256) if architecture == "amoebanet" else (own_layers or TRANSFORMER_LAYERS, None)
        model = _model(config, architecture, layers, filters)
        return make_planner(replace(config, model=model, hardware=hardware))

    rows: list[SuiteRow] = []
    for speed in speeds:
        here = planner(speed.architecture, speed.layers)
        usual = config.batch_size if speed.architecture == "amoebanet" else TRANSFORMER_BATCH_SIZE
        choice = Choice(
            partitions=speed.accelerators,
            micro_batches=speed.micro_batches,
            batch_size=speed.batch_size or usual,
            remat=speed.remat,
            cut=config.cut,
            balance=speed.balance,
            recompute_fresh=True,
        )
        plan = here.evaluate(choice)
        first = next((row.plan for row in rows if row.architecture == speed.architecture), plan)
        rows.append(
            SuiteRow(
                suite=str(config.suite),
                name=f"{speed.name or ''} K={speed.accelerators} M={speed.micro_batches}".lstrip(),
                architecture=speed.architecture,
                model=here.config.model,
                plan=plan,
                speed=speed,
                relative=plan.samples_per_s / first.samples_per_s,
            )
        )
    return rows


def _model(config: PlanConfig, architecture: str, layers: int, filters: int | None) -> ModelConfig:
    if architecture == "amoebanet":
        sizes: dict[str, Any] = {"variant": "D", "layers": layers, "filters": filters, "stem": "imagenet"}
        # Whole cells are layers, as in torchgpipe's cuts.
        sizes |= {"aux_head": False, "split_cells": False, "factory": None, "kwargs": {}}
        return replace(config.model, name="amoebanet", **sizes)
    sizes = {"name": "transformer", **TRANSFORMER_SIZES}
    return replace(config.model, layers=layers, dropout=TRANSFORMER_DROPOUT, factory=None, kwargs={}, **sizes)
