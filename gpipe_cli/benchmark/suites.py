"""The rows of the paper's tables, and of torchgpipe's benchmark, as configurations to be measured.

The real sizes: they can be measured where the hardware exists. Figures and their sources: reporting/paper.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from gpipe_cli.benchmark.grid import Case, image_size, num_classes
from gpipe_cli.errors import ConfigError
from gpipe_cli.reporting.paper import (
    CLAIM,
    TABLE1,
    TABLE2,
    TABLE3,
    TORCHGPIPE,
    TRANSFORMER_BATCH_SIZE,
    TRANSFORMER_SIZES,
    PaperSpeed,
)

if TYPE_CHECKING:
    from gpipe_cli.config import ModelConfig
    from gpipe_cli.config_bench import BenchConfig

SPEED = {"table2": (*TABLE2, *CLAIM), "table3": TABLE3, "torchgpipe": TORCHGPIPE}
# Table 1's; tables 2 and 3 do not state theirs.
BATCH_SIZE, IMAGE_SIZE = 128, 224
# Table 1 does not state the number of micro-batches. 32 is the largest of Table 2: samples come four at a time (one
# sequence at a time in the Transformer's columns).
TABLE1_MICRO_BATCHES = 32


def suite_cases(config: BenchConfig) -> list[Case]:
    """The rows of `config.suite`; `partitions`, `micro_batches` and `remat`, where they are set, choose among them.

    They are those of the configured network's kind: its Transformer columns for one that reads text, else AmoebaNet's.
    Raises ConfigError when they leave none.
    """
    rows = list(_table1(config) if config.suite == "table1" else _speed(config, SPEED[str(config.suite)]))
    if not rows:
        problem = f"has no columns for model={config.model.name}; use suite=table2 or suite=table3"
        raise ConfigError("suite", config.suite, problem)
    cases = [case for case in rows if _chosen(config, case)]
    if not cases:
        problem = "no row has these partitions, micro_batches and remat together; leave some of them out"
        raise ConfigError("suite", config.suite, problem)
    return cases


def _chosen(config: BenchConfig, case: Case) -> bool:
    return (
        case.partitions in (config.partitions or [case.partitions])
        and case.micro_batches in (config.micro_batches or [case.micro_batches])
        and case.remat in (config.remat or [case.remat])
    )


def _table1(config: BenchConfig) -> Iterable[Case]:
    if config.model.name == "module":
        problem = "is for model=amoebanet_d and model=transformer, and sets their sizes; leave model out"
        raise ConfigError("suite", config.suite, problem)
    for size in TABLE1:
        if size.architecture == config.model.name:
            naive = size.name.startswith("Naive")
            yield _case(
                config,
                name=size.name,
                model=replace(config.model, layers=size.layers, filters=size.filters or config.model.filters),
                partitions=size.accelerators,
                micro_batches=1 if naive else TABLE1_MICRO_BATCHES,
                batch_size=None,
                remat="none" if naive else "full",
                schedule="gpipe",
            )


def _speed(config: BenchConfig, rows: Iterable[PaperSpeed]) -> Iterable[Case]:
    for row in rows:
        if (row.architecture == "transformer") != (config.model.seq_len is not None):
            continue
        if row.layers is not None and not _is_the_papers(config.model):
            continue
        for schedule in config.schedule:
            yield _case(
                config,
                name=row.name,
                model=replace(config.model, layers=row.layers or config.model.layers),
                partitions=row.accelerators,
                micro_batches=row.micro_batches,
                batch_size=row.batch_size,
                remat=row.remat,
                schedule=schedule,
                balance=row.balance,
            )


def _is_the_papers(model: ModelConfig) -> bool:
    """Whether a Transformer has the paper's sizes: other sizes with as many layers are not the network it speaks of."""
    return all(getattr(model, name) == size for name, size in TRANSFORMER_SIZES.items())


def _case(
    config: BenchConfig,
    *,
    name: str | None,
    model: ModelConfig,
    partitions: int,
    micro_batches: int,
    batch_size: int | None,
    remat: str,
    schedule: str,
    balance: tuple[int, ...] | None = None,
) -> Case:
    usual = BATCH_SIZE if model.seq_len is None else TRANSFORMER_BATCH_SIZE
    return Case(
        name=name,
        # Without the auxiliary classifier: the paper's parameter counts have none.
        model=replace(model, aux_head=False),
        partitions=partitions,
        micro_batches=micro_batches,
        batch_size=config.batch_size or batch_size or usual,
        image_size=image_size(config, IMAGE_SIZE),
        num_classes=num_classes(config),
        remat=remat,
        schedule=schedule,
        balance=balance,
    )
