"""The embedded digits: complete, split the same way always, and with their licence."""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch

from gpipe_cli.data.digits import Digits, digits_info


def test_all_1797_pictures_are_there_and_a_fifth_is_held_out() -> None:
    info = digits_info()
    assert info.num_train + info.num_eval == 1797
    assert 0.19 < info.num_eval / 1797 < 0.21
    assert info.classes == tuple("0123456789")
    assert (len(Digits("train")), len(Digits("eval"))) == (info.num_train, info.num_eval)


def test_items_are_8_bit_grey_in_three_channels_over_the_full_range() -> None:
    digits = Digits("train")
    image, label = digits[0]
    assert (image.shape, image.dtype) == ((3, 8, 8), torch.uint8)
    assert isinstance(label, int)
    assert torch.equal(image[0], image[2])
    values = torch.stack([digits[index][0] for index in range(len(digits))])
    assert (int(values.min()), int(values.max()), len(values.unique())) == (0, 255, 17)


def test_splits_share_no_picture_and_hold_the_classes_in_proportion() -> None:
    train, held_out = Digits("train"), Digits("eval")
    pictures = {
        split: {image.numpy().tobytes() for image, _ in data} for split, data in (("t", train), ("e", held_out))
    }
    assert pictures["t"].isdisjoint(pictures["e"])
    share = np.bincount(held_out.labels) / (np.bincount(train.labels) + np.bincount(held_out.labels))
    assert np.all(np.abs(share - 0.2) < 0.01)


def test_a_nearest_neighbour_reads_the_held_out_digits() -> None:
    """Labels belong to their pictures: the published accuracy of this simple rule is near 98 %."""
    train, held_out = Digits("train"), Digits("eval")
    references = train.images[:, 0].flatten(1).float()
    nearest = torch.cdist(held_out.images[:, 0].flatten(1).float(), references).argmin(dim=1)
    right = torch.tensor(train.labels)[nearest] == torch.tensor(held_out.labels)
    assert right.float().mean() > 0.97


def test_attribution_travels_with_the_file() -> None:
    text = (resources.files("gpipe_cli.data") / "digits.md").read_text(encoding="utf-8")
    for fact in ("Optical Recognition of Handwritten Digits", "Alpaydin", "Kaynak", "CC BY 4.0", "Changes", "uci.edu"):
        assert fact in text
    assert f"({digits_info().num_eval} pictures; {digits_info().num_train:,} remain" in text
