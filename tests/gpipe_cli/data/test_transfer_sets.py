"""Pets, food, aircraft and cars from small archives in their true layouts: read right, or refused in one line."""

from __future__ import annotations

import io
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpipe_cli.data.datasets import open_split, prepare
from gpipe_cli.data.images import as_tensor
from gpipe_cli.data.loaders import SkippedPictures, eval_loader
from gpipe_cli.data.transfer_sets import LAYOUTS

torchvision_sets = pytest.importorskip("torchvision.datasets", reason="torchvision is not installed")

DOWNLOADED = ("oxford_pets", "food101", "fgvc_aircraft")
# Red says which picture it is, so that reading one under another's label shows.
NUM_TRAIN, NUM_EVAL = 6, 4


def picture(shade: int, form: str = "jpeg", mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 6), (shade * 20, 0, 0)).convert(mode).save(buffer, form)
    return buffer.getvalue()


def pets() -> dict[str, bytes]:
    """images/ and annotations/, an archive each. Names with capitals are cats; lists are sorted by name."""
    breeds = ("Abyssinian", "american_bulldog", "Bengal")
    lines: dict[str, list[str]] = {"trainval": [], "test": []}
    files = {"images/Abyssinian_100.mat": b"not a picture", "annotations/trimaps/._Bengal_1.png": b"macOS"}
    for number in range(NUM_TRAIN + NUM_EVAL):
        label = number % 3
        name = f"{breeds[label]}_{number}"
        files[f"images/{name}.jpg"] = picture(number, "gif" if number == 3 else "jpeg")  # a few of them are no JPEG
        split = "trainval" if number < NUM_TRAIN else "test"
        lines[split].append(f"{name} {label + 1} {1 + (label == 1)} {number // 3 + 1}")
    files |= {f"annotations/{split}.txt": "\n".join(sorted(text)).encode() + b"\n" for split, text in lines.items()}
    return files


def food() -> dict[str, bytes]:
    names = {"train": ("waffles", "apple_pie", "ramen"), "test": ("ramen", "waffles", "apple_pie")}
    files, meta = {}, {split: {name: [] for name in order} for split, order in names.items()}
    for number in range(NUM_TRAIN + NUM_EVAL):
        name = ("apple_pie", "ramen", "waffles")[number % 3]
        files[f"food-101/images/{name}/{number}00.jpg"] = picture(number)
        meta["train" if number < NUM_TRAIN else "test"][name].append(f"{name}/{number}00")
    files |= {f"food-101/meta/{split}.json": json.dumps(lists).encode() for split, lists in meta.items()}
    return files


def aircraft() -> dict[str, bytes]:
    """Its class names hold blanks and strokes; of the annotation levels the variant is the class."""
    base, variants = "fgvc-aircraft-2013b/data", ("707-320", "Boeing 717", "F/A-18")
    lines: dict[str, str] = {"trainval": "", "test": ""}
    files = {f"{base}/variants.txt": "\n".join(variants).encode() + b"\n", f"{base}/families.txt": b"Boeing 707\n"}
    for number in range(NUM_TRAIN + NUM_EVAL):
        files[f"{base}/images/{number:07}.jpg"] = picture(number, mode="L" if number == 0 else "RGB")
        lines["trainval" if number < NUM_TRAIN else "test"] += f"{number:07} {variants[number % 3]}\n"
    files |= {f"{base}/images_variant_{split}.txt": text.encode() for split, text in lines.items()}
    files |= {f"{base}/images_family_{split}.txt": b"0000000 Boeing 707\n" for split in lines}
    return files


def cars() -> dict[str, bytes]:
    """MATLAB files: an array of structs, classes from 1, and a cell array of names."""
    savemat = pytest.importorskip("scipy.io", reason="needs SciPy: pip install 'gpipe-cli[cars]'").savemat
    files = {}

    def mat(content: dict[str, Any]) -> bytes:
        buffer = io.BytesIO()
        savemat(buffer, content)
        return buffer.getvalue()

    def annotations(numbers: range) -> bytes:
        kinds = [(f"bbox_{corner}", object) for corner in ("x1", "y1", "x2", "y2")]
        rows = np.zeros((1, len(numbers)), dtype=[*kinds, ("class", object), ("fname", object)])
        for place, number in enumerate(numbers):
            corners = [np.uint8([[value]]) for value in (1, 1, 9, 6)]
            rows[0, place] = (*corners, np.uint8([[number % 3 + 1]]), f"{place + 1:05}.jpg")
            folder = "cars_train" if numbers.start == 0 else "cars_test"
            files[f"stanford_cars/{folder}/{place + 1:05}.jpg"] = picture(number)
        return mat({"annotations": rows})

    names = np.array([["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "smart fortwo"]], dtype=object)
    files["stanford_cars/devkit/cars_meta.mat"] = mat({"class_names": names})
    files["stanford_cars/devkit/cars_train_annos.mat"] = annotations(range(NUM_TRAIN))
    total = NUM_TRAIN + NUM_EVAL
    files["stanford_cars/cars_test_annos_withlabels.mat"] = annotations(range(NUM_TRAIN, total))
    return files


MAKERS = {"oxford_pets": pets, "food101": food, "fgvc_aircraft": aircraft, "stanford_cars": cars}
CLASSES = {
    "oxford_pets": ("Abyssinian", "American Bulldog", "Bengal"),
    "food101": ("apple_pie", "ramen", "waffles"),
    "fgvc_aircraft": ("707-320", "Boeing 717", "F/A-18"),
    "stanford_cars": ("AM General Hummer SUV 2000", "Acura RL Sedan 2012", "smart fortwo"),
}


def unpack(name: str, root: Path) -> Path:
    """The data set's files as its archives leave them; its own folder."""
    for file, content in MAKERS[name]().items():
        target = root / (f"oxford-iiit-pet/{file}" if name == "oxford_pets" else file)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return root / LAYOUTS[name].folder


@dataclass(frozen=True)
class Published:
    """A data set's archives and the server, not yet running, that torchvision's class takes them from."""

    server: Any
    archives: dict[str, bytes]


@pytest.fixture
def publish(
    serve: Callable, make_tar: Callable, md5: Callable, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Published]:
    def make(name: str) -> Published:
        cls = getattr(torchvision_sets, LAYOUTS[name].class_name)
        files = MAKERS[name]()
        urls = [url for url, _ in cls._RESOURCES] if name == "oxford_pets" else [cls._URL]
        names = [url.rpartition("/")[2] for url in urls]
        archives = {}
        for archive in names:
            folder = archive.partition(".")[0] if name == "oxford_pets" else LAYOUTS[name].folder
            inside = {file: content for file, content in files.items() if file.startswith(f"{folder}/")}
            archives[archive] = make_tar(inside, "gz")
        server = serve(dict(archives))
        if name == "oxford_pets":
            resources = tuple((server.url(archive), md5(archives[archive])) for archive in names)
            monkeypatch.setattr(cls, "_RESOURCES", resources)
        else:
            monkeypatch.setattr(cls, "_URL", server.url(names[0]))
        if name == "food101":
            monkeypatch.setattr(cls, "_MD5", md5(archives[names[0]]))
        return Published(server, archives)

    return make


def shades(dataset: Any) -> list[tuple[int, int]]:
    """(which picture it is, its label) of each sample."""
    return sorted((round(float(as_tensor(image)[0].float().mean()) / 20), label) for image, label in dataset)


@pytest.mark.parametrize("name", list(MAKERS))
def test_layout_is_read_with_every_picture_under_its_own_label(settings: Callable, tmp_path: Path, name: str) -> None:
    unpack(name, tmp_path)
    config = settings(name, path=tmp_path)
    info = prepare(config, 0)
    assert (info.name, info.num_train, info.num_eval, info.classes) == (name, NUM_TRAIN, NUM_EVAL, CLASSES[name])
    numbers = range(NUM_TRAIN + NUM_EVAL)
    expected = [(number, number % 3) for number in numbers]
    if name == "fgvc_aircraft":
        expected[0] = (0, 0)
    assert shades(open_split(config, "train", 0)) == expected[:NUM_TRAIN]
    assert shades(open_split(config, "eval", 0)) == expected[NUM_TRAIN:]


@pytest.mark.parametrize("name", list(MAKERS))
def test_number_of_pictures_is_compared_with_the_published_one(
    settings: Callable, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = unpack(name, tmp_path)
    prepare(settings(name, path=tmp_path), 0)
    published = {"oxford_pets": 3_669, "food101": 25_250, "fgvc_aircraft": 3_333, "stanford_cars": 8_041}[name]
    line = f"{folder / LAYOUTS[name].lists['eval']}: lists 4 pictures, as published it has {published:,}"
    assert line in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("name", DOWNLOADED)
def test_download_is_unpacked_and_read(
    settings: Callable, publish: Callable, tmp_path: Path, name: str, left_in: Callable
) -> None:
    published = publish(name)
    published.server.start()
    config = settings(name, path=tmp_path / "new", download=True)
    assert prepare(config, 0).num_train == NUM_TRAIN
    assert left_in(tmp_path / "new") == {LAYOUTS[name].folder}
    assert not list((tmp_path / "new").rglob("*.tar.gz"))
    prepare(config, 0)
    assert published.server.num_requests == len(published.archives)


def test_four_processes_at_once_fetch_each_archive_once(settings: Callable, publish: Callable, tmp_path: Path) -> None:
    published = publish("oxford_pets")
    config = settings("oxford_pets", path=tmp_path, download=True)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=prepare, args=(config, 0)) for _ in range(4)]
    for process in processes:
        process.start()
    published.server.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert published.server.num_requests == 2


@pytest.mark.parametrize("name", DOWNLOADED)
def test_archives_that_lie_there_are_unpacked_without_the_network(
    settings: Callable, publish: Callable, tmp_path: Path, name: str
) -> None:
    published = publish(name)
    for archive, content in published.archives.items():
        (tmp_path / archive).write_bytes(content)
    assert prepare(settings(name, path=tmp_path), 0).num_eval == NUM_EVAL
    assert published.server.num_requests == 0
    assert all((tmp_path / archive).is_file() for archive in published.archives)


@pytest.mark.parametrize("name", DOWNLOADED)
def test_missing_data_without_download_name_both_remedies(
    settings: Callable, publish: Callable, tmp_path: Path, name: str, refused: Callable
) -> None:
    published = publish(name)
    message = refused(settings(name, path=tmp_path / "data"))
    assert f"dataset.path={tmp_path / 'data'}: no {LAYOUTS[name].folder}/ there, no " in message
    assert "use dataset.download=true, or put there" in message
    assert all(published.server.url(archive) in message for archive in published.archives)
    assert not (tmp_path / "data").exists()


def test_damaged_archive_is_named_with_the_failed_check(
    settings: Callable, publish: Callable, tmp_path: Path, refused: Callable
) -> None:
    published = publish("oxford_pets")
    for archive, content in published.archives.items():
        (tmp_path / archive).write_bytes(content if archive == "images.tar.gz" else content[:-9])
    message = refused(settings("oxford_pets", path=tmp_path))
    assert "annotations.tar.gz fails its MD5 check; use dataset.download=true" in message
    assert "no images.tar.gz" not in message


@pytest.mark.parametrize("cut", [4, 300])
def test_half_an_archive_without_a_checksum_is_not_installed(
    settings: Callable, publish: Callable, tmp_path: Path, cut: int, refused: Callable, left_in: Callable
) -> None:
    name = "fgvc-aircraft-2013b.tar.gz"
    content = publish("fgvc_aircraft").archives[name]
    (tmp_path / name).write_bytes(content[:-cut])
    message = refused(settings("fgvc_aircraft", path=tmp_path))
    assert f"unpacking {name} failed: " in message
    assert left_in(tmp_path) == {name}


def test_download_that_breaks_off_leaves_nothing(
    settings: Callable, publish: Callable, tmp_path: Path, refused: Callable, left_in: Callable
) -> None:
    server = publish("fgvc_aircraft").server
    server.num_bytes_lost = 5000
    server.start()
    message = refused(settings("fgvc_aircraft", path=tmp_path, download=True))
    assert "fgvc-aircraft-2013b.tar.gz failed: the connection ended after" in message
    assert left_in(tmp_path) == set()


@pytest.mark.parametrize("name", list(MAKERS))
def test_missing_picture_is_named_with_its_list_and_the_remedy(
    settings: Callable, tmp_path: Path, name: str, refused: Callable
) -> None:
    folder = unpack(name, tmp_path)
    victims = sorted(folder.rglob("*.jpg"))[:2]
    for victim in victims:
        victim.unlink()
    message = refused(settings(name, path=tmp_path))
    assert any(f"{victim.relative_to(tmp_path)} is listed in" in message for victim in victims)
    assert "pictures missing); " in message
    assert ("www.kaggle.com" if name == "stanford_cars" else f"remove {folder} and fetch it anew") in message
    assert folder.is_dir()  # and nothing was replaced


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("split", ["train", "eval"])
def test_missing_or_cut_list_is_named(
    settings: Callable, tmp_path: Path, name: str, split: str, refused: Callable
) -> None:
    folder = unpack(name, tmp_path)
    victim = folder / LAYOUTS[name].lists[split]
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) // 2 if victim.suffix == ".mat" else -3])  # in the middle of a line
    assert f"{victim.relative_to(tmp_path)} cannot be read (" in refused(settings(name, path=tmp_path))
    victim.write_bytes(b"")
    assert str(victim.relative_to(tmp_path)) in refused(settings(name, path=tmp_path))
    victim.unlink()
    assert f"{victim.relative_to(tmp_path)} is missing; " in refused(settings(name, path=tmp_path))


def test_splits_of_other_classes_are_refused(settings: Callable, tmp_path: Path, refused: Callable) -> None:
    """Food-101 numbers the classes of each list for itself: one that lacks a class would shift the labels."""
    folder = unpack("food101", tmp_path)
    lists = json.loads((folder / "meta/test.json").read_text())
    del lists["apple_pie"]
    (folder / "meta/test.json").write_text(json.dumps(lists))
    message = refused(settings("food101", path=tmp_path))
    assert "food-101/meta/test.json has other classes than meta/train.json" in message


def test_label_without_a_class_is_refused(settings: Callable, tmp_path: Path, refused: Callable) -> None:
    list_file = unpack("oxford_pets", tmp_path) / "annotations/trainval.txt"
    list_file.write_text("Bengal_2 3 1 1\nAbyssinian_0 1 1 1\n")
    assert "annotations/trainval.txt has label 3 but names 2 classes" in refused(settings("oxford_pets", path=tmp_path))


def test_cars_say_where_they_are_and_how_they_must_lie(settings: Callable, tmp_path: Path, refused: Callable) -> None:
    pytest.importorskip("scipy", reason="needs SciPy: pip install 'gpipe-cli[cars]'")
    message = refused(settings("stanford_cars", path=tmp_path))
    assert message.startswith(f"dataset.path={tmp_path}: no stanford_cars/ there, and nothing can fetch it; put into ")
    for part in ("cars_train/", "cars_test/", "cars_test_annos_withlabels.mat", "devkit/cars_meta.mat", "https://"):
        assert part in message


def test_cars_without_scipy_name_the_command(
    settings: Callable, tmp_path: Path, refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'gpipe-cli[cars]'" in refused(settings("stanford_cars", path=tmp_path))


def test_unreadable_picture_is_left_out_when_asked(settings: Callable, tmp_path: Path) -> None:
    folder = unpack("fgvc_aircraft", tmp_path)
    (folder / "data/images/0000007.jpg").write_bytes(b"")
    config = settings("fgvc_aircraft", path=tmp_path, corrupt="skip")
    lines: list[str] = []
    loader = eval_loader(
        config, prepare(config, 0), image_size=8, batch_size=4, workers=0, seed=0, skipped=SkippedPictures(lines.append)
    )
    assert sum(len(labels) for _, labels in loader) == NUM_EVAL - 1
    assert str(folder / "data/images/0000007.jpg") in lines[0]


def test_some_classes_and_samples_are_taken_by_name(settings: Callable, tmp_path: Path) -> None:
    unpack("fgvc_aircraft", tmp_path)
    config = settings("fgvc_aircraft", path=tmp_path, classes=("F/A-18", "707-320"), samples_per_class=1)
    info = prepare(config, 3)
    assert (info.num_train, info.num_eval, info.classes) == (2, 3, ("F/A-18", "707-320"))
    assert shades(open_split(config, "eval", 3)) == [(6, 1), (8, 0), (9, 1)]
