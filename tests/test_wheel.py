"""`pip install .`: the wheel holds every source, setting and data file, below one package, and works from anywhere."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"gpipe_cli": "gpipe_cli", "models": "gpipe_cli/models", "conf": "gpipe_cli/conf"}
OLDEST_SETUPTOOLS = 77


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy, so that nothing is left in the clone and nothing in it from earlier builds gets in."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed here")
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here (building in isolation would need the network)")
    if int(metadata.version("setuptools").split(".")[0]) < OLDEST_SETUPTOOLS:
        pytest.skip(f"setuptools {OLDEST_SETUPTOOLS} or later builds this project; here is an older one")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    output = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "wheel", "--no-deps"]
    built = subprocess.run(
        [*pip, "--no-build-isolation", "--no-index", "--wheel-dir", str(output), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (file,) = output.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        yield wheel


def expected_files() -> set[str]:
    return {
        f"{inside}/{file.relative_to(ROOT / outside).as_posix()}"
        for outside, inside in SOURCES.items()
        for file in (ROOT / outside).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_holds_every_file_of_the_sources_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    described = {name for name in names if ".dist-info/" in name}
    assert names - described == expected_files()
    assert any(name.endswith("LICENSE") for name in described)


def test_what_the_wheel_holds_runs_from_an_empty_directory(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "installed")
    empty = tmp_path / "empty"
    empty.mkdir()

    def python(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    found = python("-c", "import gpipe_cli.models, gpipe_cli.conf; print(gpipe_cli.models.__file__)")
    assert Path(found.strip()).is_relative_to(tmp_path / "installed")
    assert "partitions: 3" in python("-m", "gpipe_cli", "train", "partitions=3", "--cfg")
    assert list(empty.iterdir()) == []
