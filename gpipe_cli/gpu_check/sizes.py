"""How large everything is: once for a GPU, once so small that a CPU walks through the same code in a minute.

Settings are those of `gpipe bench`; whatever they do not name has its default there.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9

# Whole cells are layers, as in the paper's and torchgpipe's cuts; the auxiliary head is no part of Table 1.
PAPERS_NETWORK = ("model=amoebanet_d", "model.aux_head=false", "model.split_cells=false")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the parts work on. `equality`: the network of the equality and precision checks; `filters`, `layers`: what
    Table 1's search tries, beside the paper's two sizes `naive` and `pipeline` (L, D); batches, from the largest on,
    of which throughput takes the first that fits."""

    equality: tuple[str, ...]
    equality_batch_size: int
    throughput: tuple[str, ...]
    throughput_batches: tuple[int, ...]
    throughput_micro_batches: int
    warmup_steps: int
    max_steps: int
    row_s: float  # after so many seconds a row has enough steps
    compile_backend: str
    table1: tuple[str, ...]
    table1_batch_size: int
    table1_micro_batches: int
    naive: tuple[int, int]
    pipeline: tuple[int, int]
    filters: tuple[int, ...]
    layers: tuple[int, ...]
    search_s: float
    limit_bytes: int
    prediction: tuple[str, ...]
    prediction_batch_size: int
    is_tiny: bool = False


FULL = Sizes(
    # Down to 2 x 2 pixels at the end; dropout and drop path draw in every cell.
    equality=(
        *PAPERS_NETWORK, "model.layers=3", "model.filters=16", "image_size=64", "num_classes=10",
        "model.dropout=0.3", "model.drop_path=0.3",
    ),
    equality_batch_size=10,
    throughput=(*PAPERS_NETWORK, "model.layers=6", "model.filters=256", "image_size=224"),
    throughput_batches=(64, 32, 16, 8),
    throughput_micro_batches=4,
    warmup_steps=3,
    max_steps=12,
    row_s=6.0,
    compile_backend="inductor",
    table1=(*PAPERS_NETWORK, "image_size=224"),  # PAPER, Table 1
    table1_batch_size=128,  # PAPER, Table 1
    table1_micro_batches=32,  # not stated there; the most of Table 2, as in gpipe plan suite=table1
    naive=(18, 208),  # PAPER, Table 1
    pipeline=(18, 416),  # PAPER, Table 1
    filters=tuple(range(16, 1025, 16)),  # all of the paper's are multiples of 16
    layers=tuple(range(3, 121, 3)),  # as many normal cells in each third
    search_s=30.0,
    limit_bytes=8 * GB,  # PAPER, Table 1: 8 GB an accelerator
    prediction=(*PAPERS_NETWORK, "model.layers=6", "model.filters=64", "image_size=224"),
    prediction_batch_size=32,
)  # fmt: skip

_TINY = (*PAPERS_NETWORK, "model.layers=2", "model.stem=small", "num_classes=10")

TINY = Sizes(
    equality=(*_TINY, "model.filters=8", "image_size=16", "model.dropout=0.3", "model.drop_path=0.3"),
    equality_batch_size=10,
    throughput=(*_TINY, "model.filters=4", "image_size=8"),
    throughput_batches=(8,),
    throughput_micro_batches=2,
    warmup_steps=1,
    max_steps=2,
    row_s=0.1,
    compile_backend="eager",
    table1=(*_TINY, "image_size=8"),
    table1_batch_size=8,
    table1_micro_batches=4,
    naive=(2, 8),
    pipeline=(2, 16),
    filters=(4, 8, 12, 16),
    layers=(2, 3, 4),
    search_s=20.0,
    limit_bytes=500_000,
    prediction=(*_TINY, "model.filters=8", "image_size=32"),  # smaller, and what no plan counts would weigh
    prediction_batch_size=32,
    is_tiny=True,
)
