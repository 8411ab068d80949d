"""The folder of a run."""

from __future__ import annotations

import errno
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpipe_cli.errors import ConfigError, TrainingError
from gpipe_cli.reporting.run_directory import (
    check_tables_can_be_written,
    given_run_directory,
    holds_checkpoint,
    new_run_directory,
    one_line_if_not_written,
    read_config,
    write_config,
)


def test_runs_that_start_at_one_moment_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_run_directory(tmp_path, "train", "net", "data"), range(8)))
    assert len(set(made)) == 8
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d-train-net-data-[1-8]", path.name) for path in made)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"results_dir=.*file: cannot be written: .*; name another folder"):
        new_run_directory(tmp_path / "file", "train", "net", "data")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "runs").symlink_to("nowhere/at/all")  # must not be tried for ever
    with pytest.raises(ConfigError, match="cannot be written"):
        new_run_directory(tmp_path / "results", "train", "net", "data")


def test_a_chosen_folder_may_exist_but_hold_no_other_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert given_run_directory(folder, checkpoint=None) == folder
    assert given_run_directory(folder, checkpoint=None) == folder
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="already holds a run; choose another folder, or resume="):
        given_run_directory(folder, checkpoint=None)
    checkpoint = folder / "checkpoints" / "step-00000001"
    assert given_run_directory(folder, checkpoint=checkpoint) == folder
    with pytest.raises(ConfigError, match=r"already holds a run; choose another folder$"):
        given_run_directory(folder, checkpoint=tmp_path / "other" / "checkpoints" / "step-00000001")


def test_a_checkpoint_belongs_to_the_folder_that_it_lies_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert holds_checkpoint(Path("run"), tmp_path / "run" / "best" / "step-00000001")
    assert not holds_checkpoint(Path("run"), tmp_path / "run2" / "best" / "step-00000001")


def test_tables_are_checked_without_making_anything(tmp_path: Path) -> None:
    check_tables_can_be_written(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"results_dir=.*/file/sub: .*/file is a file; name a folder"):
        check_tables_can_be_written(tmp_path / "file" / "sub")


def test_a_training_configuration_without_one_of_its_groups_is_damaged(tmp_path: Path) -> None:
    write_config(tmp_path, {"command": "train", "model": {}, "dataset": {}, "lr_schedule": {}})
    with pytest.raises(ConfigError, match=r"its config\.yaml is damaged: the group optimizer is missing"):
        read_config(tmp_path)


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = {"command": "bench", "a": 1, "b": {"c": [1.5, None], "d": "x: y"}, "e": True}
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert read_config(tmp_path / "nowhere") is None
    (tmp_path / "config.yaml").write_text("just text")
    with pytest.raises(ConfigError, match=r"its config\.yaml holds no settings"):
        read_config(tmp_path)


def test_a_disk_that_refuses_is_one_line_with_the_file(tmp_path: Path) -> None:
    full = pytest.raises(TrainingError, match=r"^metrics: cannot be written: No space left on device$")
    with full, one_line_if_not_written(Path("metrics")):
        raise OSError(errno.ENOSPC, "No space left on device")
    absent = pytest.raises(TrainingError, match=r"^.*/no/file: cannot be written: No such file or directory$")
    with absent, one_line_if_not_written(Path("metrics")):
        (tmp_path / "no" / "file").write_text("x")
