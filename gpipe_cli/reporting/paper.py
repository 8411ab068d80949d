"""What the paper and torchgpipe report, as data with their source: what our rows stand next to.

[P] Huang et al., "GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism", arXiv 1811.06965, section 4 for the
accuracies, tables 1 to 3 for memory and speed; [B] the authors' announcement of March 2019, which quotes an earlier
version of [P]; [K] kakaobrain/torchgpipe, docs/benchmarks.rst, settings from benchmarks/amoebanetd-speed/main.py.
"""

from __future__ import annotations

from dataclasses import dataclass

P = "Huang et al. 2019, arXiv 1811.06965, section 4"
B = "authors' announcement, March 2019"


@dataclass(frozen=True)
class PaperAccuracy:
    """One result of AmoebaNet-B (18, 512), 557M parameters; fractions in [0, 1], None where the source does not say.

    `dataset` is gpipe's name of the data set. `previous_best` is the best that the paper knew
    before it.
    """

    dataset: str
    num_train: int
    num_eval: int
    num_classes: int
    top1: float
    top5: float | None
    previous_best: float | None
    image_size: int | None
    source: str


# ImageNet was trained at 480x480 over 4 partitions; the others are fine-tuned from it, their pictures resized to
# 480x480, mean of 5 runs.
ACCURACY = (
    PaperAccuracy("imagenet", 1_281_167, 50_000, 1000, 0.844, None, 0.839, 480, P),
    PaperAccuracy("imagenet", 1_281_167, 50_000, 1000, 0.843, 0.970, None, 480, B),
    PaperAccuracy("cifar10", 50_000, 10_000, 10, 0.990, None, 0.985, 480, P),
    PaperAccuracy("cifar100", 50_000, 10_000, 100, 0.913, None, 0.893, 480, P),
    PaperAccuracy("stanford_cars", 8_144, 8_041, 196, 0.946, None, 0.948, 480, P),
    PaperAccuracy("oxford_pets", 3_680, 3_369, 37, 0.959, None, 0.938, 480, P),
    PaperAccuracy("food101", 75_750, 25_250, 101, 0.930, None, 0.904, 480, P),
    PaperAccuracy("fgvc_aircraft", 6_667, 3_333, 100, 0.927, None, 0.929, 480, P),
    PaperAccuracy("birdsnap", 47_386, 2_443, 500, 0.836, None, 0.802, 480, P),
)


TABLE1_SOURCE = "Huang et al. 2019, arXiv 1811.06965, table 1"
GIB = 2**30


@dataclass(frozen=True)
class PaperSize:
    """A column of Table 1: the largest model that fits. Bytes over all accelerators.

    What the table prints as GB are 10^9 bytes in AmoebaNet's columns and 2^30 in the Transformer's: only so are they
    12 bytes times the parameters that it prints (785.8M: 8.8; 83.9B: 937.9; see PRINTED_GB). In the Transformer's
    Naive-1, 12 bytes times 282.2M parameters are the 3.15 that stand there as activations: its two figures seem to have
    changed places. They are given here as printed.

    `filters` is None for the Transformer. `torchgpipe_parameter_bytes` and `torchgpipe_activation_bytes`: [K]'s figures
    for the same model; None where it has none, or ran out of memory.
    """

    architecture: str
    name: str
    layers: int
    filters: int | None
    accelerators: int
    num_parameters: float
    parameter_bytes: float
    activation_bytes: float
    torchgpipe_parameter_bytes: float | None = None
    torchgpipe_activation_bytes: float | None = None


# AmoebaNet-D (L, D) at 224 x 224, mini-batch 128, RMSProp, on TPUv2 with 8 GB an accelerator; Transformer-L with
# sequences of 1024, batch 32, on TPUv3 with 16 GB. [K] prints GiB.
TABLE1 = (
    PaperSize("amoebanet", "Naive-1", 18, 208, 1, 82e6, 1.05e9, 6.26e9, 0.91 * GIB, None),
    PaperSize("amoebanet", "Pipeline-1", 18, 416, 1, 318e6, 3.8e9, 3.46e9, 3.57 * GIB, 0.91 * GIB),
    PaperSize("amoebanet", "Pipeline-2", 18, 544, 2, 542e6, 6.45e9, 8.11e9, 6.07 * GIB, 3.39 * GIB),
    PaperSize("amoebanet", "Pipeline-4", 36, 544, 4, 1.05e9, 12.53e9, 15.21e9, 11.80 * GIB, 6.91 * GIB),
    PaperSize("amoebanet", "Pipeline-8", 72, 512, 8, 1.8e9, 24.62e9, 26.24e9, 20.62 * GIB, 10.83 * GIB),
    PaperSize("transformer", "Naive-1", 3, None, 1, 282.2e6, 11.7 * GIB, 3.15 * GIB),
    PaperSize("transformer", "Pipeline-1", 13, None, 1, 785.8e6, 8.8 * GIB, 6.4 * GIB),
    PaperSize("transformer", "Pipeline-8", 103, None, 8, 5.3e9, 59.5 * GIB, 50.9 * GIB),
    PaperSize("transformer", "Pipeline-32", 415, None, 32, 21.0e9, 235.1 * GIB, 199.9 * GIB),
    PaperSize("transformer", "Pipeline-128", 1663, None, 128, 83.9e9, 937.9 * GIB, 796.1 * GIB),
)
BYTES_PER_PARAMETER = 12  # of Table 1: weight, mean square and momentum (Adam: weight and two averages), no gradient
PRINTED_GB = {"amoebanet": 1e9, "transformer": GIB}  # bytes of what it prints as GB, by architecture
TRANSFORMER_BATCH_SIZE = 32  # Table 1's
# What all of the paper's Transformers share, by the names of model's settings; the vocabulary of exactly 32,000 is
# lingvo's (tasks/lm/params/one_billion_wds.py).
TRANSFORMER_SIZES = {"width": 2048, "num_heads": 32, "ff_width": 8192, "vocab_size": 32_000, "seq_len": 1024}
TRANSFORMER_DROPOUT = 0.1  # lingvo's
TRANSFORMER_LAYERS = 48  # of tables 2 and 3


@dataclass(frozen=True)
class PaperSpeed:
    """Training throughput relative to that table's first row. `batch_size`, `balance`: None where not stated.

    `name`, `layers`: of a row with a network of its own, which counts from the first row of that name.
    """

    architecture: str
    accelerators: int
    micro_batches: int
    relative: float
    remat: str = "full"
    batch_size: int | None = None
    balance: tuple[int, ...] | None = None
    name: str | None = None
    layers: int | None = None


# AmoebaNet-D (18, 256) and a Transformer of 48 layers on TPUs.
TABLE2 = (
    *(
        PaperSpeed(architecture, accelerators, micro_batches, relative)
        for architecture, rows in (
            ("amoebanet", {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)}),
            ("transformer", {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}),
        )
        for micro_batches, figures in rows.items()
        for accelerators, relative in zip((2, 4, 8), figures, strict=True)
    ),
)

# [B]: a Transformer of 8 billion parameters on sentences of 1024 tokens runs 11 times as fast on 16 TPUv3. As what,
# with how many micro-batches and layers, it does not say. Here: as the same 16 without pipelining, with 32 micro-
# batches (Table 1's batch) and 156 layers of Table 1's width, which come nearest to 8 billion.
CLAIM = (
    PaperSpeed("transformer", 16, 1, 1.0, name="8B", layers=156),
    PaperSpeed("transformer", 16, 32, 11.0, name="8B", layers=156),
)

# The same on P100 GPUs without NVLink, 32 micro-batches.
TABLE3 = (
    *(
        PaperSpeed(architecture, accelerators, 32, relative)
        for architecture, figures in (("amoebanet", (1, 1.7, 2.7)), ("transformer", (1, 1.8, 3.3)))
        for accelerators, relative in zip((2, 4, 8), figures, strict=True)
    ),
)

# [K]: AmoebaNet-D (18, 256) on Tesla P40. Its sequence has the same 24 layers as ours, so its cuts are comparable.
TORCHGPIPE = (
    PaperSpeed("amoebanet", 2, 1, 1.0, "full", 96, (7, 17)),
    PaperSpeed("amoebanet", 4, 1, 1.004, "full", 160, (3, 4, 5, 12)),
    PaperSpeed("amoebanet", 8, 1, 0.932, "full", 196, (2, 2, 2, 2, 2, 3, 4, 7)),
    PaperSpeed("amoebanet", 2, 4, 1.539, "except_last", 256, (9, 15)),
    PaperSpeed("amoebanet", 4, 4, 1.666, "except_last", 360, (3, 6, 7, 8)),
    PaperSpeed("amoebanet", 8, 4, 2.621, "except_last", 480, (2, 2, 2, 3, 3, 4, 4, 4)),
    PaperSpeed("amoebanet", 2, 32, 1.773, "except_last", 1280, (9, 15)),
    PaperSpeed("amoebanet", 4, 32, 2.709, "except_last", 1152, (3, 6, 7, 8)),
    PaperSpeed("amoebanet", 8, 32, 4.953, "except_last", 1280, (2, 2, 2, 3, 3, 4, 4, 4)),
)
TORCHGPIPE_SAMPLES_PER_S = 26.7  # what is 1 in TORCHGPIPE
