"""Accuracies that the paper reports, as data with their source: what our rows stand next to.

[P] Huang et al., "GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism", arXiv 1811.06965, section 4;
[B] the authors' announcement of March 2019, which quotes an earlier version of [P].
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


# ImageNet was trained at 480x480 over 4 partitions; the others are fine-tuned from it, mean of 5 runs, input size
# not stated.
ACCURACY = (
    PaperAccuracy("imagenet", 1_281_167, 50_000, 1000, 0.844, None, 0.839, 480, P),
    PaperAccuracy("imagenet", 1_281_167, 50_000, 1000, 0.843, 0.970, None, 480, B),
    PaperAccuracy("cifar10", 50_000, 10_000, 10, 0.990, None, 0.985, None, P),
    PaperAccuracy("cifar100", 50_000, 10_000, 100, 0.913, None, 0.893, None, P),
    PaperAccuracy("stanford_cars", 8_144, 8_041, 196, 0.946, None, 0.948, None, P),
    PaperAccuracy("oxford_pets", 3_680, 3_369, 37, 0.959, None, 0.938, None, P),
    PaperAccuracy("food101", 75_750, 25_250, 101, 0.930, None, 0.904, None, P),
    PaperAccuracy("fgvc_aircraft", 6_667, 3_333, 100, 0.927, None, 0.929, None, P),
    PaperAccuracy("birdsnap", 47_386, 2_443, 500, 0.836, None, 0.802, None, P),
)
