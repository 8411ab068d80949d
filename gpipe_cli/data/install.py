"""Published archives to a folder that is whole or not there: verified, unpacked aside, renamed.

torchvision verifies (MD5), unpacks and reads. Here that happens aside, in a hidden folder beside the final place, and a
rename ends it: an interruption leaves no half data set that looks whole. A lock makes a second run wait, not download
again.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
import tarfile
import tempfile
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from gpipe_cli.errors import ConfigError

_STALLED_AFTER_S = 60.0  # a server that sends nothing for so long has failed
_ASIDE = ".unpacking-"


@dataclass(frozen=True)
class Archive:
    """A published file. `folder`: where torchvision looks for it below its root.

    `md5` is None where torchvision knows none; the file is then gzip, which has a checksum of its own.
    """

    url: str
    md5: str | None
    folder: str = "."

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def is_whole(self, folder: Path) -> bool:
        """Whether `folder` holds it, with the right checksum."""
        return is_whole(folder / self.name, self.md5)


def data_root(name: str, path: str | None) -> Path:
    """The folder of data set `name`. Raises ConfigError when none is given."""
    if path is None:
        raise ConfigError("dataset.path", None, f"dataset={name} needs the folder of its data, dataset.path=FOLDER")
    return Path(path).expanduser()


def is_whole(file: Path, md5: str | None) -> bool:
    """Whether the file exists and has that checksum, if one is given."""
    from torchvision.datasets.utils import check_integrity

    return bool(check_integrity(file, md5))


def install(root: Path, folder: str, archives: Sequence[Archive], unpack: Callable[[Path], object]) -> None:
    """Make `root/folder` from its archives, those in `root` or else downloaded; call it within `exclusive(root)`.

    `unpack` gets a folder with the archives in it and makes `folder` there. One that exists is replaced. Raises
    ConfigError, one line, and leaves nothing new, when an archive cannot be had or is damaged.
    """
    for stale in root.glob(f"{_ASIDE}*"):  # of a run that was killed; the lock says that no other is at work
        shutil.rmtree(stale, ignore_errors=True)
    doing = "unpacking"
    with tempfile.TemporaryDirectory(dir=root, prefix=_ASIDE, ignore_cleanup_errors=True) as name:
        aside = Path(name)
        try:
            for archive in archives:
                place = aside / archive.folder
                place.mkdir(parents=True, exist_ok=True)
                if archive.is_whole(root):
                    doing = f"unpacking {archive.name}"
                    (place / archive.name).symlink_to((root / archive.name).resolve())
                else:
                    doing = f"downloading {archive.url}"
                    _download(archive.url, place / archive.name)
                    if not archive.is_whole(place):
                        raise OSError("what came fails its MD5 check")
                if archive.md5 is None:
                    _check_gzip(place / archive.name)
            if len(archives) > 1:
                doing = f"unpacking {' and '.join(archive.name for archive in archives)}"
            with without_deprecations():
                unpack(aside)
        except (
            OSError,
            HTTPException,
            RuntimeError,
            EOFError,
            tarfile.TarError,
            zlib.error,
            ValueError,
            LookupError,
        ) as error:
            names = " and ".join(archive.name for archive in archives)
            remedy = f"try again, or put {names} into {root} yourself"
            raise ConfigError("dataset.path", root, f"{doing} failed: {reason(error)}; {remedy}") from None
        for archive in archives:
            (aside / archive.folder / archive.name).unlink(missing_ok=True)  # it may lie in the folder that stays
        if (root / folder).exists():
            os.rename(root / folder, aside / "damaged")
        os.rename(aside / folder, root / folder)


def reason(error: BaseException) -> str:
    """What went wrong, in words; torchvision's "corrupted" is a failed checksum."""
    return "the archive fails its MD5 check" if "corrupted" in str(error) else str(error) or type(error).__name__


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the folder's lock, creating the folder. Raises ConfigError when it cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / ".gpipe-lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigError("dataset.path", root, f"cannot write there: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also when the process is killed
        yield


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Without what torchvision's ways provoke and a user cannot change.

    Python 3.12 and 3.13 deprecate tarfile without a filter; NumPy 2.4 deprecates the integers 0 and 1 as flags of a
    dtype, as they stand in the pickles of CIFAR.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
        yield


def _check_gzip(file: Path) -> None:
    """Read to the end, where the checksum is: unpacking stops before it. Raises EOFError, OSError or zlib.error."""
    with gzip.open(file) as content:
        while content.read(2**20):
            pass


def _download(url: str, file: Path) -> None:
    """One request, a bar on a terminal. (torchvision's function asks twice, and waits for a silent server forever.)"""
    from tqdm import tqdm

    request = urllib.request.Request(url, headers={"User-Agent": "gpipe"})
    with urllib.request.urlopen(request, timeout=_STALLED_AFTER_S) as response, open(file, "wb") as target:
        size = int(response.headers.get("Content-Length") or 0) or None
        # disable=None: no bar unless it is a terminal
        with tqdm(total=size, unit="B", unit_scale=True, desc=file.name, leave=False, disable=None) as bar:
            while block := response.read(2**18):
                target.write(block)
                bar.update(len(block))
        if size is not None and target.tell() != size:
            raise OSError(f"the connection ended after {target.tell():,} of {size:,} bytes")
