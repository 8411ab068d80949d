"""A suite's columns on the screen and in results/plan.{csv,md}: predicted beside reported, all of ours simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpipe_cli.planning.suites import SuiteRow, torchgpipe_samples_per_s
from gpipe_cli.planning.text import aligned
from gpipe_cli.reporting.paper import PRINTED_GB
from gpipe_cli.reporting.tables import (
    KIND,
    SIMULATED,
    Column,
    Row,
    Table,
    code,
    grouped,
    percent,
    rounded,
    update,
)

SOURCES = {
    "table1": "Huang et al. 2019, arXiv 1811.06965, table 1; torchgpipe, docs/benchmarks.rst",
    "table2": "Huang et al. 2019, arXiv 1811.06965, table 2",
    "table3": "Huang et al. 2019, arXiv 1811.06965, table 3",
    "torchgpipe": "torchgpipe, docs/benchmarks.rst, and benchmarks/amoebanetd-speed/main.py",
}

MEMORY_NOTES = (
    "Parameter memory: 12 bytes a parameter as in the paper: weight, mean square and momentum (Adam: weight and two",
    "averages), without the gradient, which makes 16.",
    "The paper's own counts times 12 differ from its memory where ours do: 82M give 0.98 GB, 1.8B give 21.6 GB.",
    "Activation memory, sum of the accelerators' peaks: ours are float32 tensors that PyTorch's autograd keeps for one",
    "micro-batch, plus the inputs of all of them (the paper does not state M; 32 here). The TPU's compiler fuses",
    "operations and stores activations its own way, and counts its temporary buffers; cuts differ as well.",
    "torchgpipe's figures are measured on GPUs, which keep what ours keep; its Naive-1 ran out of 24 GB.",
    "Transformer: what the paper prints as GB are GiB there: only so are its figures 12 bytes times its parameters. In",
    "its Naive-1, 12 bytes times 282.2M are the 3.15 that it prints as activations, and the 11.7 printed as parameters",
    "are near our activations: the two figures seem to have changed places.",
)
CLAIM_NOTES = (
    "8B: the authors' announcement says 11 times as fast on 16 TPUv3, not as what, nor with which layers and M. Here:",
    "156 layers of Table 1's width, relative to the same 16 accelerators with one micro-batch, as in Table 2. Equal",
    "stages without transfers or updates would give 16 x 32 / (32 + 15) = 10.9.",
)
_RECOMPUTED = (
    "Every micro-batch is recomputed, as the paper's and torchgpipe's code do; gpipe spares what is still there."
)
NOTES = {
    "table1": (*MEMORY_NOTES, *CLAIM_NOTES),
    "table2": (
        "Relative to the first row. The paper states neither mini-batch nor cut for these rows: one mini-batch is used",
        "for all of a network here, and the cut with the least predicted time. Its rows gain from K also by larger",
        "mini-batches.",
        _RECOMPUTED,
        *CLAIM_NOTES,
    ),
    "table3": (
        "Relative to the first row. The paper states neither mini-batch nor cut for these rows.",
        _RECOMPUTED,
    ),
    "torchgpipe": (
        "Relative to the first row; mini-batches, cuts and re-materialization are torchgpipe's own.",
        "The share of the P40's peak that is reached was fitted to the first row's images/s (conf/hardware/p40.yaml).",
        _RECOMPUTED,
    ),
}


def describe_suite(rows: Sequence[SuiteRow]) -> list[str]:
    """The suite's tables, one an architecture, and one for a network of its own."""
    lines: list[str] = []
    for architecture, own in dict.fromkeys(map(_table_of, rows)):
        group = [row for row in rows if _table_of(row) == (architecture, own)]
        words = f"{architecture} of {own}" if own is not None else architecture
        lines += [f"{rows[0].suite}, {words} on {group[0].plan.hardware.name}: SIMULATED beside reported", ""]
        lines += _sizes(group) if group[0].size is not None else _speeds(group)
        lines.append("")
    return [*lines, *NOTES[rows[0].suite]]


def _table_of(row: SuiteRow) -> tuple[str, str | None]:
    return row.architecture, row.speed.name if row.speed is not None else None


def _sizes(rows: Sequence[SuiteRow]) -> list[str]:
    unit = PRINTED_GB[rows[0].architecture]
    gb = "GB" if unit == 1e9 else "GiB"
    headings = [
        "column", "L, D", "K", "parameters", "paper", f"their {gb}", "paper", "off %", "torchgpipe", "off %",
        f"activations {gb}", "paper", "torchgpipe", f"largest {gb}", "fits", "samples/s",
    ]  # fmt: skip
    table = []
    for row in rows:
        size, plan = row.size, row.plan
        assert size is not None
        table.append(
            [
                row.name,
                f"{size.layers}, {size.filters}" if size.filters else str(size.layers),
                str(size.accelerators),
                _short(plan.num_parameters),
                _short(size.num_parameters),
                f"{plan.parameter_bytes / unit:.2f}",
                f"{size.parameter_bytes / unit:.2f}",
                _off(plan.parameter_bytes, size.parameter_bytes),
                _in(unit, size.torchgpipe_parameter_bytes),
                _off(plan.parameter_bytes, size.torchgpipe_parameter_bytes),
                f"{plan.activation_bytes / unit:.2f}",
                f"{size.activation_bytes / unit:.2f}",
                _in(unit, size.torchgpipe_activation_bytes),
                f"{max(plan.memory_bytes_per_rank) / unit:.2f}",
                "yes" if plan.fits else "no",
                f"{plan.samples_per_s:.3g}",
            ]
        )
    return _filled(headings, table)


def _speeds(rows: Sequence[SuiteRow]) -> list[str]:
    headings = [
        "row", "batch", "cut", "relative", "reported", "samples/s", "reported", "bubble %", "largest GB", "fits",
    ]  # fmt: skip
    table = []
    for row in rows:
        plan, speed = row.plan, row.speed
        assert speed is not None
        reported = torchgpipe_samples_per_s(row)
        table.append(
            [
                row.name,
                str(plan.choice.batch_size),
                "+".join(map(str, plan.balance)),
                f"{row.relative:.3f}",
                f"{speed.relative:.3f}",
                f"{plan.samples_per_s:.4g}",
                "" if reported is None else f"{reported:.4g}",
                f"{100 * plan.simulation.bubble_fraction:.1f}",
                f"{max(plan.memory_bytes_per_rank) / 1e9:.2f}",
                "yes" if plan.fits else "no",
            ]
        )
    return _filled(headings, table)


def _filled(headings: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    """Aligned, without the columns in which there is nothing."""
    filled = [column for column in range(len(headings)) if any(row[column] for row in table)]
    return aligned([headings[column] for column in filled], [[row[column] for column in filled] for row in table])


def _short(number: float) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _in(unit: float, num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / unit:.2f}"


def _off(ours: float, reported: float | None) -> str:
    return "" if reported is None else f"{100 * (ours / reported - 1):+.1f}"


def _gigabytes(text: str) -> str:
    return f"{float(text) / 1e9:.2f}"


_COLUMNS = (
    Column("suite", "suite"),
    Column("model", "model"),
    Column("name", "row"),
    Column("layers", "L"),
    Column("filters", "D"),
    Column("hardware", "hardware"),
    Column("partitions", "partitions"),
    Column("micro_batches", "micro-batches"),
    Column("batch_size", "batch"),
    Column("remat", "remat"),
    Column("schedule"),
    Column("precision"),
    Column("balance"),
    Column("num_parameters", "parameters", grouped),
    Column("parameter_bytes", "their GB", _gigabytes),
    Column("reported_parameter_bytes", "paper's", _gigabytes),
    Column("torchgpipe_parameter_bytes", "torchgpipe's", _gigabytes),
    Column("activation_bytes", "activations GB", _gigabytes),
    Column("reported_activation_bytes", "paper's", _gigabytes),
    Column("torchgpipe_activation_bytes", "torchgpipe's", _gigabytes),
    Column("fits"),
    Column("step_time_s"),
    Column("samples_per_s", "samples/s", rounded),
    Column("relative", "relative", rounded),
    Column("reported_relative", "reported", rounded),
    Column("bubble_fraction", "bubble %", percent),
    Column(KIND, "kind"),
    Column("command_line", "command", code),
    Column("source", "reported in"),
)


def _order(row: Mapping[str, str]) -> tuple[str | int, ...]:
    return (row["suite"], row["model"], int(row["partitions"]) if row["suite"] == "table1" else 0)


TABLE = Table(
    name="plan",
    title="Predicted memory and speed",
    introduction=(
        "Every row is simulated by `gpipe plan` from counted operations and the hardware's published numbers; nothing "
        "in it was measured. GB is 10^9 bytes; what the paper prints as GB is taken as 2^30 bytes in its Transformer "
        "columns, where only so it is 12 bytes a parameter. What the paper and torchgpipe report stands beside it."
    ),
    columns=_COLUMNS,
    key=("suite", "model", "name"),
    reported=(),
    order=_order,
)


def update_plan_table(results_dir: Path, rows: Sequence[SuiteRow], command_line: str) -> None:
    """Put the rows into results/plan.{csv,md}. Raises OSError; the table is then as before."""
    for row in rows:
        update(results_dir, TABLE, _row(row, command_line))


def _row(row: SuiteRow, command_line: str) -> Row:
    plan, size, speed, model = row.plan, row.size, row.speed, row.model
    return {
        "suite": row.suite,
        "model": f"amoebanet-{model.variant}" if model.name == "amoebanet" else model.name,
        "name": row.name,
        "layers": model.layers,
        "filters": model.filters if model.name == "amoebanet" else None,
        "hardware": plan.hardware.name,
        "partitions": plan.choice.partitions,
        "micro_batches": plan.choice.micro_batches,
        "batch_size": plan.choice.batch_size,
        "remat": plan.choice.remat,
        "schedule": plan.schedule.policy,
        "balance": "+".join(map(str, plan.balance)),
        "num_parameters": plan.num_parameters,
        "parameter_bytes": int(plan.parameter_bytes) if size else None,
        "reported_parameter_bytes": int(size.parameter_bytes) if size else None,
        "torchgpipe_parameter_bytes": _whole(size.torchgpipe_parameter_bytes) if size else None,
        "activation_bytes": plan.activation_bytes if size else None,
        "reported_activation_bytes": int(size.activation_bytes) if size else None,
        "torchgpipe_activation_bytes": _whole(size.torchgpipe_activation_bytes) if size else None,
        "fits": str(plan.fits).lower(),
        "step_time_s": plan.simulation.step_time_s,
        "samples_per_s": plan.samples_per_s,
        "relative": row.relative,
        "reported_relative": speed.relative if speed else None,
        "bubble_fraction": plan.simulation.bubble_fraction,
        KIND: SIMULATED,
        "command_line": command_line,
        "source": SOURCES[row.suite],
    }


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
