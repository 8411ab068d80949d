"""AmoebaNet as a sequence of named layers, as the authors' code builds it (tensorflow/tpu `models/official/amoeba_net`,
`model_builder.py`): stem, normal cells with two reduction cells among them, classifier.

Where the GPipe paper leaves a choice open: the ImageNet stem has a quarter of the filters (only so do the paper's
parameter counts come out); the stem for small images has all of them, and SAME padding, so that an 8 x 8 picture stays
8 x 8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from .cell import Cell
from .genotypes import GENOTYPES, NUM_PAIRS
from .operations import Conv, Norm, truncated_normal_

Layers = list[tuple[str, Callable[[], nn.Module]]]

# model_builder.py: `_build_aux_head`, with `aux_scaling` 0.4
AUX_CHANNELS = (int(0.4 * 128), int(0.4 * 768))
AUX_POOL_KERNEL, AUX_POOL_STRIDE = 5, 3


# Pairs of operations in the first half of a split cell: with its inputs' convolutions about half of the work. By
# whether the cell reduces: its first pairs work at the larger size.
CELL_CUT = {False: 2, True: 1}


class Stem(nn.Sequential):
    """3x3 convolution and batch norm, no ReLU: images (N, in, H, W) to (N, channels, H', W').

    `imagenet`: stride 2 without padding, H' = (H - 1) // 2. Otherwise stride 1, H' = H.
    """

    def __init__(self, in_channels: int, channels: int, imagenet: bool, norm: Norm) -> None:
        conv = Conv(in_channels, channels, 3, stride=2 if imagenet else 1, same=not imagenet)
        super().__init__(OrderedDict(conv=conv, norm=norm(channels)))


class AuxHead(nn.Module):
    """In training, appends the auxiliary classifier's logits (N, classes) to the tuple; in evaluation, changes nothing.

    `size` is the height and width of the cell output that it reads: its second convolution covers all that the pool
    leaves of it. Raises ValueError in forward for another size.
    """

    def __init__(self, in_channels: int, num_classes: int, size: int, norm: Norm) -> None:
        super().__init__()
        self.size = size
        # The pool covers the whole map where that is smaller than its window (images below about 80 pixels).
        self.kernel = min(AUX_POOL_KERNEL, size)
        pooled = (size - self.kernel) // AUX_POOL_STRIDE + 1
        hidden, features = AUX_CHANNELS
        self.reduce = Conv(in_channels, hidden)
        self.reduce_norm = norm(hidden)
        self.full = Conv(hidden, features, pooled, same=False)
        self.full_norm = norm(features)
        self.linear = linear(features, num_classes)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.training:
            return inputs
        maps = inputs[1]
        if tuple(maps.shape[2:]) != (self.size, self.size):
            raise ValueError(
                f"the auxiliary head was built for maps of {self.size} x {self.size}, got "
                f"{maps.shape[2]} x {maps.shape[3]}: train at the image_size the network was built for"
            )
        maps = F.avg_pool2d(maps, self.kernel, AUX_POOL_STRIDE)
        maps = F.relu_(self.reduce_norm(self.reduce(maps)))
        maps = F.relu_(self.full_norm(self.full(maps)))
        return *inputs, self.linear(maps.flatten(1))


class Classifier(nn.Module):
    """Global average pool, dropout, linear: (previous, current) to logits (N, classes).

    From (previous, current, aux_logits) to (logits, aux_logits).
    """

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = linear(in_channels, num_classes)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
        _, current, *aux_logits = inputs
        logits: Tensor = self.linear(self.dropout(current.mean(dim=(2, 3))))
        return (logits, aux_logits[0]) if aux_logits else logits


def linear(in_features: int, out_features: int) -> nn.Linear:
    """A linear layer whose logits start below one for any number of classes: weight variance 1 / in, bias 0.

    The authors scale by fan-out here as in the convolutions, which for 10 classes starts far above a loss of ln 10.
    """
    layer = nn.Linear(in_features, out_features)
    truncated_normal_(layer.weight, in_features**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def amoebanet(
    *,
    variant: str = "D",
    num_layers: int = 18,
    num_filters: int = 256,
    num_classes: int = 1000,
    stem: Literal["imagenet", "small"] = "imagenet",
    in_channels: int = 3,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    drop_path_by_depth: bool = False,
    aux_head: bool = False,
    bn_momentum: float = 0.1,
    bn_eps: float = 1e-5,
    image_size: int | None = None,
    split_cells: bool = False,
) -> Layers:
    """The layers of AmoebaNet-`variant` with `num_layers` normal cells and `num_filters` filters: (name, factory).

    Images are (N, in_channels, H, W) with any H and W from 8 up. A layer hands on a tensor or a tuple of tensors, as
    nn.Sequential passes it to the next. `dropout` is the drop probability before the classifier, `drop_path` that of
    an operation at the end of the training, with `drop_path_by_depth` growing linearly over the cells to the last.
    `bn_momentum` is torch's (1 - decay). `aux_head` needs `image_size`, in pixels; in training the last layer then
    returns (logits, aux_logits). `split_cells` makes two layers of every cell, NAME and NAME_end, so that the network
    can be cut more evenly; inside a cell more tensors cross than between cells.

    Raises ValueError for an argument out of range, naming it and what is allowed.
    """
    _check(variant, num_layers, num_filters, num_classes, stem, dropout, drop_path, aux_head, image_size)
    genotype = GENOTYPES[variant]
    norm = partial(nn.BatchNorm2d, eps=bn_eps, momentum=bn_momentum)
    imagenet = stem == "imagenet"
    stem_channels = num_filters // 4 if imagenet else num_filters
    layers: Layers = [("stem", partial(Stem, in_channels, stem_channels, imagenet, norm))]

    plan = _plan_cells(num_layers, num_filters, imagenet)
    previous_channels: int | None = None
    current_channels = stem_channels
    after_reduction = False
    size = _stem_size(image_size, imagenet) if image_size else None
    for index, (name, filters, reduction) in enumerate(plan):
        cell_genotype = genotype.reduction if reduction else genotype.normal
        depth_share = (index + 1) / len(plan) if drop_path_by_depth else 1.0
        factory = partial(
            Cell,
            cell_genotype,
            previous_channels,
            current_channels,
            filters,
            reduction=reduction,
            after_reduction=after_reduction,
            drop_path=drop_path * depth_share,
            norm=norm,
        )
        if name == "reduction_1" and aux_head and size is not None:
            layers.append(("aux_head", partial(AuxHead, current_channels, num_classes, size, norm)))
        if split_cells:
            halves = (range(CELL_CUT[reduction]), range(CELL_CUT[reduction], NUM_PAIRS))
            layers += [(name, partial(factory, pairs=halves[0])), (f"{name}_end", partial(factory, pairs=halves[1]))]
        else:
            layers.append((name, factory))
        previous_channels, current_channels = current_channels, filters * len(cell_genotype.outputs)
        after_reduction = reduction
        if size is not None and reduction:
            size = (size + 1) // 2
    layers.append(("classifier", partial(Classifier, current_channels, num_classes, dropout)))
    return layers


def _plan_cells(num_layers: int, num_filters: int, imagenet: bool) -> list[tuple[str, int, bool]]:
    """Name, filters and whether it reduces, for every cell in order."""
    plan = [("stem_cell_0", num_filters // 4, True), ("stem_cell_1", num_filters // 2, True)] if imagenet else []
    filters = num_filters
    reductions = [num_layers // 3, 2 * num_layers // 3]
    for index in range(num_layers):
        if index in reductions:
            filters *= 2
            plan.append((f"reduction_{reductions.index(index)}", filters, True))
        plan.append((f"normal_{index}", filters, False))
    return plan


def _stem_size(image_size: int, imagenet: bool) -> int:
    """Height and width of the stem's output."""
    return (image_size - 1) // 2 if imagenet else image_size


def _check(
    variant: str,
    num_layers: int,
    num_filters: int,
    num_classes: int,
    stem: str,
    dropout: float,
    drop_path: float,
    aux_head: bool,
    image_size: int | None,
) -> None:
    problems = []
    if variant not in GENOTYPES:
        problems.append(f"variant={variant!r}: expected one of {', '.join(GENOTYPES)}")
    if num_layers < 2:
        problems.append(f"num_layers={num_layers}: expected 2 or more, one for each reduction cell to stand before")
    if num_filters < 4 or num_filters % 4:
        problems.append(f"num_filters={num_filters}: expected a multiple of 4, the stem has a quarter of them")
    if num_classes < 1:
        problems.append(f"num_classes={num_classes}: expected 1 or more")
    if stem not in ("imagenet", "small"):
        problems.append(f"stem={stem!r}: expected imagenet or small")
    for name, probability in (("dropout", dropout), ("drop_path", drop_path)):
        if not 0.0 <= probability < 1.0:
            problems.append(f"{name}={probability}: expected a probability of at least 0 and below 1")
    if image_size is not None and image_size < 8:
        problems.append(f"image_size={image_size}: expected 8 pixels or more")
    if aux_head and image_size is None:
        problems.append("aux_head=True: needs image_size, which sets the size of its convolution")
    if problems:
        raise ValueError("; ".join(problems))
