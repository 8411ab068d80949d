"""`results/memory.{csv,md}`: how much memory each configuration takes, next to the paper's Table 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpipe_cli.reporting.paper import TABLE1, TABLE1_SOURCE, TRANSFORMER_BATCH_SIZE, TRANSFORMER_SIZES
from gpipe_cli.reporting.tables import KIND, REPORTED, Column, Row, Table, update
from gpipe_cli.reporting.throughput import WHAT, WHENCE, each, megabytes, place

_COLUMNS = (
    Column("name", "paper's name"),
    *WHAT,
    Column("outcome", "outcome"),
    Column("parameter_memory_bytes", "parameters, MB", megabytes),
    Column("activation_bytes", "activations, MB", megabytes),
    Column("activation_bytes_per_rank", "activations a rank, MB", each(megabytes)),
    Column("peak_memory_bytes_per_rank", "peak of the process a rank, MB", each(megabytes)),
    *WHENCE,
)


def update_memory(results_dir: Path, row: Row) -> None:
    """Put one of our rows, measured or simulated, into the table. Raises OSError; the table is then as before."""
    update(results_dir, TABLE, row)


def _reported() -> Iterator[Row]:
    for size in TABLE1:
        amoebanet = size.architecture == "amoebanet"
        common: Row = {
            "name": size.name,
            "model": "amoebanet-D" if amoebanet else size.architecture,
            "variant": "D" if amoebanet else None,
            "layers": size.layers,
            "filters": size.filters,
            "num_parameters": round(size.num_parameters),
            "image_size": 224 if amoebanet else None,
            "seq_len": None if amoebanet else TRANSFORMER_SIZES["seq_len"],
            "batch_size": 128 if amoebanet else TRANSFORMER_BATCH_SIZE,
            "partitions": size.accelerators,
            "remat": "none" if size.name.startswith("Naive") else "full",
            KIND: REPORTED,
        }
        yield {
            **common,
            "device": "TPUv2, 8 GB" if amoebanet else "TPUv3, 16 GB",
            "parameter_memory_bytes": round(size.parameter_bytes),
            "activation_bytes": round(size.activation_bytes),
            "source": TABLE1_SOURCE,
        }
        if size.torchgpipe_parameter_bytes is not None:
            fits = size.torchgpipe_activation_bytes is not None
            yield {
                **common,
                "device": "P40",
                "outcome": None if fits else "out of memory",
                "parameter_memory_bytes": round(size.torchgpipe_parameter_bytes),
                "activation_bytes": round(size.torchgpipe_activation_bytes or 0) or None,
                "source": "torchgpipe, docs/benchmarks.rst",
            }


TABLE = Table(
    name="memory",
    title="Memory",
    introduction=(
        "Rows of kind `measured` come from `gpipe bench`, each with its machine and command, `simulated` ones from "
        "`gpipe plan`; rows of kind `reported` are others' figures, with their source. Parameters: weights, gradients "
        "and what the optimizer keeps, over all ranks (reported ones: 12 bytes a parameter). Activations: the peak of "
        "what is held for backward passes, counted tensor by tensor, summed over the ranks and for each; reported ones "
        "count all that is not parameters. Peak of the process: what was allocated on a GPU, the resident set on a "
        "CPU, which holds Python and PyTorch as well. MB is 10^6 bytes; the paper's GB are taken as 2^30 in its "
        "Transformer columns, where only so they are 12 bytes a parameter. Other columns as in throughput.md."
    ),
    columns=_COLUMNS,
    key=("configuration", "machine", KIND),
    reported=tuple(_reported()),
    order=place,
)
