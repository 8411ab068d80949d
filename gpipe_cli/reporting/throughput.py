"""`results/throughput.{csv,md}`: how fast each configuration trains, next to the paper's and torchgpipe's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gpipe_cli.reporting.paper import (
    CLAIM,
    TABLE2,
    TABLE3,
    TORCHGPIPE,
    TORCHGPIPE_SAMPLES_PER_S,
    TRANSFORMER_LAYERS,
    B,
    PaperSpeed,
)
from gpipe_cli.reporting.tables import KIND, REPORTED, Column, Row, Table, code, grouped, percent, rounded, update


def milliseconds(text: str) -> str:
    """Seconds as milliseconds, to four significant digits."""
    return f"{1e3 * float(text):.4g}"


def times(text: str) -> str:
    """A ratio, with two decimals."""
    return f"{float(text):.2f}"


def megabytes(text: str) -> str:
    """Bytes as MB (10^6)."""
    return f"{float(text) / 1e6:.4g}"


def each(show: Callable[[str], str]) -> Callable[[str], str]:
    """For a cell with a number a rank, apart by spaces: each shown by `show`."""
    return lambda text: " ".join(show(part) for part in text.split())


def per_rank(values: Iterable[float | int | None] | None) -> str | None:
    """The text of such a cell; None where a rank's number is not known."""
    if values is None:
        return None
    texts = ["" if value is None else str(value) for value in values]
    return " ".join(texts) if all(texts) else None


# What a configuration is; every table of measurements begins with these columns.
WHAT = (
    Column("model", "model"),
    Column("variant"),
    Column("layers", "L"),
    Column("filters", "D"),
    Column("num_parameters", "parameters", grouped),
    Column("image_size", "input"),
    Column("seq_len", "tokens"),
    Column("batch_size", "batch"),
    Column("partitions", "K"),
    Column("micro_batches", "M"),
    Column("remat", "remat"),
    Column("kept", "kept"),
    Column("schedule", "schedule"),
    Column("taper", "sizes"),
    Column("baseline", "baseline"),
    Column("balance", "cut"),
    Column("precision"),
    Column("device", "device"),
    Column("world_size"),
    Column("threads", "threads a rank"),
    Column("layout", "layout"),
    Column("optimizer"),
)
# Where a row comes from: every table of measurements ends with these.
WHENCE = (
    Column(KIND, "kind"),
    Column("machine", "machine"),
    Column("date", "date"),
    Column("command_line", "command", code),
    Column("source", "source"),
    Column("configuration"),
)
_COLUMNS = (
    *WHAT,
    Column("samples_per_s", "samples/s", rounded),
    Column("tokens_per_s", "tokens/s", rounded),
    Column("step_time_s", "step, ms", milliseconds),
    Column("step_time_low_s", "from", milliseconds),
    Column("step_time_high_s", "to", milliseconds),
    Column("bubble_fraction"),
    Column("bubble_fraction_per_rank", "bubble a rank, %", each(percent)),
    Column("num_bytes_sent_per_rank", "sent a rank and step, MB", each(megabytes)),
    Column("num_rematerializations", "recomputed"),
    Column("ratio_single", "x single", times),
    Column("ratio_naive", "x naive", times),
    Column("ratio_torch", "x torch", times),
    Column("speedup", "speed-up", times),
    Column("speedup_over", "over"),
    Column("warmup_steps"),
    Column("steps", "steps"),
    Column("rounds"),
    *WHENCE,
)


def update_throughput(results_dir: Path, row: Row) -> None:
    """Put one of our rows, measured or simulated, into the table. Raises OSError; the table is then as before."""
    update(results_dir, TABLE, row)


def _reported(rows: Iterable[PaperSpeed], device: str, source: str, reference: str, one: float | None) -> list[Row]:
    return [
        {
            "model": "amoebanet-D" if row.architecture == "amoebanet" else row.architecture,
            "variant": "D" if row.architecture == "amoebanet" else None,
            "layers": 18 if row.architecture == "amoebanet" else row.layers or TRANSFORMER_LAYERS,
            "filters": 256 if row.architecture == "amoebanet" else None,
            "batch_size": row.batch_size,
            "partitions": row.accelerators,
            "micro_batches": row.micro_batches,
            "remat": row.remat,
            "schedule": "gpipe",
            "balance": per_rank(row.balance),
            "device": device,
            "samples_per_s": None if one is None else round(one * row.relative, 1),
            "speedup": row.relative,
            "speedup_over": reference,
            KIND: REPORTED,
            "source": source,
        }
        for row in rows
    ]


_PAPER = "Huang et al. 2019, arXiv 1811.06965"
_REPORTED: tuple[Row, ...] = (
    *_reported(TABLE2, "TPU", f"{_PAPER}, table 2", "K=2 M=1", None),
    *_reported(TABLE3, "P100", f"{_PAPER}, table 3", "K=2 M=32", None),
    *_reported(CLAIM[1:], "TPUv3", f"{B}; M and L are ours", "not stated", None),
    *_reported(TORCHGPIPE, "P40", "torchgpipe, docs/benchmarks.rst", "K=2 M=1", TORCHGPIPE_SAMPLES_PER_S),
)


def place(row: Mapping[str, str]) -> tuple[str | int, ...]:
    """Others' rows first, as they come; then ours: network, input, batch, re-materialization, schedule, M, K; and
    behind them, what they are compared with."""
    if row.get(KIND) == REPORTED:
        return (0,)

    def number(name: str) -> int:
        text = row.get(name, "")
        return int(text) if text.isdigit() else 0

    sizes = tuple(number(name) for name in ("layers", "filters", "image_size", "seq_len", "batch_size"))
    how = (row.get("device", ""), row.get("remat", ""), row.get("schedule", ""), row.get("taper", ""))
    return (
        1, row.get("model", ""), *sizes, int(row.get("baseline", "") != ""), row.get("baseline", ""), *how,
        number("micro_batches"), number("partitions"),
    )  # fmt: skip


TABLE = Table(
    name="throughput",
    title="Throughput",
    introduction=(
        "Rows of kind `measured` come from `gpipe bench`, each with its machine and command, `simulated` ones from "
        "`gpipe plan`; rows of kind `reported` are others' figures, with their source, and tell ratios only. "
        "K: partitions, M: micro-batches, L: normal cells (or blocks), D: filters; kept: with remat=auto, the "
        "micro-batches that each stage need not recompute; sizes: those of the micro-batches, where they are not even; "
        "tokens: those of a sample of text. A step is forward and "
        "backward through all layers and the optimizer's update of one mini-batch that is already there; its time, "
        "from the moment when all ranks begin to the moment when all have ended, is the median with its quartiles (the "
        "extremes of fewer than four), warm-up excluded. Samples/s follow from it. The bubble is the share of the step "
        "in which a rank waits for others. `x single`: ratio to an ordinary PyTorch loop on all cores; `x naive`: to "
        "the same partitions with one micro-batch; `x torch`: to torch.distributed.pipelining's ScheduleGPipe with the "
        "same processes, cut for its own schedule, checkpointed where ours re-materializes. Ratios are medians over "
        "rounds in which both were measured in turn. Layout is the memory format; baselines run in the faster of two "
        "(torch's with channels-last inside its stages only, as it refuses to send such tensors). Our processes keep "
        "the memory that they have freed, as in `gpipe train`; `single` and `torch` are ordinary PyTorch programs, "
        "which give it back."
    ),
    columns=_COLUMNS,
    key=("configuration", "machine", KIND),
    reported=_REPORTED,
    order=place,
)
