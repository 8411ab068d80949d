"""ImageNet from small archives as they are distributed, and from class folders: the whole way to a batch."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from gpipe_cli.data.datasets import open_split, prepare
from gpipe_cli.data.loaders import eval_loader, train_loader

pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")


@pytest.fixture
def imagenet_archives(tmp_path: Path, make_tar: Callable, md5: Callable, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Training and validation archives with two classes, as distributed: a tar of tars, and pictures in a row."""
    from torchvision.datasets import imagenet

    wnids = ["n01440764", "n02084071"]
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "jpeg")
    picture = buffer.getvalue()
    meta = dict(imagenet.ARCHIVE_META)
    inner = {f"{wnid}.tar": {f"{wnid}_{index}.JPEG": picture for index in range(3)} for wnid in wnids}
    train = make_tar({name: make_tar(files) for name, files in inner.items()})
    val = make_tar({f"ILSVRC2012_val_{index:08}.JPEG": picture for index in range(4)})
    for split, content in (("train", train), ("val", val)):
        (tmp_path / meta[split][0]).write_bytes(content)
        meta[split] = (meta[split][0], md5(content))
    monkeypatch.setattr(imagenet, "ARCHIVE_META", meta)
    # What the devkit archive becomes: names of the classes, and the class of each validation picture.
    torch.save(({wnid: (wnid,) for wnid in wnids}, [wnids[1], wnids[0], wnids[1], wnids[1]]), tmp_path / "meta.bin")
    return tmp_path


def test_imagenet_archives_are_unpacked_into_class_folders(imagenet_archives: Path, settings: Callable) -> None:
    config = settings("imagenet", path=imagenet_archives)
    info = prepare(config, 0)
    assert (info.num_train, info.num_eval, info.classes) == (6, 4, ("n01440764", "n02084071"))
    assert open_split(config, "eval", 0).labels == [0, 1, 1, 1]
    assert not list(imagenet_archives.glob(".unpacking*"))
    for archive in imagenet_archives.glob("*.tar"):
        archive.unlink()
    assert prepare(config, 0) == info  # unpacked once, the archives are not needed


def test_damaged_imagenet_archive_leaves_no_half_split(
    imagenet_archives: Path, settings: Callable, refused: Callable
) -> None:
    archive = imagenet_archives / "ILSVRC2012_img_train.tar"
    archive.write_bytes(archive.read_bytes()[:-1])
    assert "unpacking train/ failed: the archive fails its MD5 check" in refused(
        settings("imagenet", path=imagenet_archives)
    )
    assert not (imagenet_archives / "train").exists()


def test_missing_imagenet_archives_are_named(
    settings: Callable, tmp_path: Path, refused: Callable, left_in: Callable
) -> None:
    message = refused(settings("imagenet", path=tmp_path))
    for name in ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"):
        assert name in message
    assert not left_in(tmp_path)
    assert "dataset.path=null" in refused(settings("imagenet"))


def test_imagenet_that_is_already_unpacked_needs_no_archive(settings: Callable, write_tree: Callable) -> None:
    root = write_tree({"train/n01440764": 2, "train/n02084071": 1, "val/n02084071": 1})
    assert prepare(settings("imagenet", path=root), 0).num_train == 3


@pytest.fixture
def sample_tree(tmp_path: Path) -> Path:
    """Pictures as photographers leave them, a folder for each class, the same ones in both splits.

    Wide, tall and tiny ones, grey ones, with a palette, with transparency, CMYK and bits, all of them named .JPEG.
    """
    colours = torch.arange(60 * 40 * 3, dtype=torch.int32).remainder(251).to(torch.uint8).view(40, 60, 3)
    photo = Image.fromarray(colours.numpy())
    pictures = {
        "n01440764": (photo, "jpeg"),
        "n01629819": (photo.convert("L").resize((500, 333)), "jpeg"),
        "n02084071": (photo.resize((30, 90)), "jpeg"),
        "n02087394": (photo.convert("P"), "gif"),
        "n03065424": (photo.convert("CMYK"), "jpeg"),
        "n03347037": (photo.resize((7, 5)), "png"),
        "n03388043": (photo.convert("RGBA"), "png"),
        "n03417042": (photo.convert("LA"), "png"),
        "n03594734": (photo.convert("1"), "png"),
    }
    for split in ("train", "val"):
        for name, (picture, form) in pictures.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            picture.save(folder / f"{name}_0.JPEG", form)
    return tmp_path


@pytest.mark.parametrize(("name", "image_size", "workers"), [("imagenet", 224, 0), ("folder", 480, 2)])
def test_pictures_of_every_kind_pass_the_imagenet_pipeline_without_a_warning(
    settings: Callable, sample_tree: Path, name: str, image_size: int, workers: int
) -> None:
    """Warnings are errors here; so they are in the loader's processes, which are forked."""
    config = settings(
        name, path=sample_tree, augment="inception", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    info = prepare(config, 0)
    assert (info.num_train, info.num_eval, info.num_classes) == (9, 9, 9)
    arguments = {"image_size": image_size, "batch_size": 3, "workers": workers, "seed": 0}
    train, evaluation = (
        list(loader(config, info, **arguments, **more))
        for loader, more in ((train_loader, {"epoch": 0}), (eval_loader, {}))
    )
    for batches in (train, evaluation):
        assert [tuple(images.shape) for images, _ in batches] == [(3, 3, image_size, image_size)] * 3
        assert all(images.dtype == torch.float32 and images.isfinite().all() for images, _ in batches)
    labels = torch.cat([labels for _, labels in evaluation])
    assert labels.tolist() == list(range(9))
    assert sorted(torch.cat([labels for _, labels in train]).tolist()) == list(range(9))
