"""Generated pictures depend on their index alone and show their class."""

from __future__ import annotations

import torch

from gpipe_cli.data.synthetic import Synthetic, synthetic_info


def make(split: str = "train", seed: int = 0, num_samples: int = 40) -> Synthetic:
    return Synthetic(split, seed, num_samples=num_samples, num_classes=4, image_size=16)


def test_a_sample_depends_on_seed_split_and_index_only() -> None:
    image, label = make()[9]
    assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.uint8, 1)
    torch.rand(5)  # the global generator has no part in it
    assert torch.equal(make(num_samples=10)[9][0], image)
    assert not torch.equal(make(seed=1)[9][0], image)
    assert not torch.equal(make("eval")[9][0], image)
    assert not torch.equal(make()[13][0], image)  # the same class


def test_classes_can_be_told_apart_on_the_other_split() -> None:
    train, held_out = list(make()), list(make("eval"))
    centres = torch.stack([torch.stack([x.float() for x, y in train if y == label]).mean(0) for label in range(4)])
    guesses = [int((centres - image.float()).square().sum((1, 2, 3)).argmin()) for image, _ in held_out]
    assert guesses == [label for _, label in held_out]


def test_sizes_follow_the_settings() -> None:
    info = synthetic_info(64, 4)
    assert (info.num_train, info.num_eval, info.num_classes) == (64, 12, 4)
    assert synthetic_info(2, 2).num_eval == 1
