"""The rows of the paper's tables, and of torchgpipe's benchmark, as configurations to be measured.

The real sizes: they can be measured where the hardware exists. Figures and their sources: reporting/paper.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from gpipe_cli.benchmark.grid import Case
from gpipe_cli.errors import ConfigError
from gpipe_cli.reporting.paper import TABLE1, TABLE2, TABLE3, TORCHGPIPE, PaperSpeed

if TYPE_CHECKING:
    from gpipe_cli.config_bench import BenchConfig

SPEED = {"table2": TABLE2, "table3": TABLE3, "torchgpipe": TORCHGPIPE}
BATCH_SIZE = 128  # Table 1's; tables 2 and 3 do not state theirs
# Table 1 does not state the number of micro-batches. 32 is the largest of Table 2: samples come four at a time.
TABLE1_MICRO_BATCHES = 32


def suite_cases(config: BenchConfig) -> list[Case]:
    """The rows of `config.suite`; `partitions`, `micro_batches` and `remat`, where they are set, choose among them.

    Raises ConfigError when they leave none.
    """
    rows = _table1(config) if config.suite == "table1" else _speed(config, SPEED[str(config.suite)])
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
    if config.model.name != "amoebanet":
        raise ConfigError("suite", config.suite, "is for model=amoebanet_d, and sets its sizes; leave model out")
    for size in TABLE1:
        if size.architecture == "amoebanet" and size.filters is not None:
            naive = size.name.startswith("Naive")
            yield Case(
                name=size.name,
                # Without the auxiliary classifier: the paper's parameter counts have none.
                model=replace(config.model, layers=size.layers, filters=size.filters, aux_head=False),
                partitions=size.accelerators,
                micro_batches=1 if naive else TABLE1_MICRO_BATCHES,
                batch_size=config.batch_size or BATCH_SIZE,
                image_size=config.image_size,
                remat="none" if naive else "full",
                schedule="gpipe",
            )


def _speed(config: BenchConfig, rows: Iterable[PaperSpeed]) -> Iterable[Case]:
    for row in rows:
        if row.architecture == "amoebanet":
            for schedule in config.schedule:
                yield Case(
                    model=replace(config.model, aux_head=False),
                    partitions=row.accelerators,
                    micro_batches=row.micro_batches,
                    batch_size=config.batch_size or row.batch_size or BATCH_SIZE,
                    image_size=config.image_size,
                    remat=row.remat,
                    schedule=schedule,
                    balance=row.balance,
                )
