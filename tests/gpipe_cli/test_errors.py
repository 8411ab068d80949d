"""Errors print as one line, carry their facts and cross process boundaries."""

from __future__ import annotations

import pickle

import pytest

from gpipe_cli.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GpipeError,
    RankFailedError,
    TrainingError,
    as_typed,
)

EXAMPLES = [
    (GpipeError("something"), "something", 1),
    (ConfigError("partitions", 4.5, "expected a whole number"), "partitions=4.5: expected a whole number", 2),
    (ConfigError(None, "--x", "unknown option"), "--x: unknown option", 2),
    (ConfigError(None, None, "nothing to do"), "nothing to do", 2),
    (DataError("a/b.png", "cannot be decoded"), "a/b.png: cannot be decoded", 1),
    (TrainingError("step 3: the loss is nan"), "step 3: the loss is nan", 1),
    (CheckpointError("runs/1", "truncated"), "runs/1: truncated", 1),
    (RankFailedError(2, "killed by signal 9"), "rank 2: killed by signal 9", 1),
]


@pytest.mark.parametrize(("error", "line", "exit_code"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_the_text_and_the_exit_code_of_each_error(error: GpipeError, line: str, exit_code: int) -> None:
    assert str(error) == line
    assert error.exit_code == exit_code


@pytest.mark.parametrize("error", [error for error, _, _ in EXAMPLES], ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_with_their_facts(error: GpipeError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_text_of_several_lines_becomes_one_line() -> None:
    assert "\n" not in str(ConfigError("run_dir", "a\nb", "first\nsecond"))
    assert str(TrainingError("first\n  second")) == "first second"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (5.0, "5"),
        (0.004, "0.004"),
        (4, "4"),
        ("4", "'4'"),
        ("true", "'true'"),
        ("abc", "abc"),
        ("", ""),
        ((3, 2), "[3,2]"),
        ({"a": None}, "{a:null}"),
    ],
)
def test_values_are_shown_as_the_user_types_them(value: object, text: str) -> None:
    assert as_typed(value) == text


def test_a_long_value_does_not_push_the_reason_off_the_line() -> None:
    line = str(ConfigError("run_dir", "x" * 1000, "expected less"))
    assert len(line) < 120
    assert line.endswith("expected less")
