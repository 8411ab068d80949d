"""A function in a process of its own."""

from __future__ import annotations

import os

import pytest

from gpipe_cli.benchmark.apart import apart
from gpipe_cli.errors import ConfigError, RankFailedError


def pid_and(value: int) -> tuple[int, int]:
    return os.getpid(), value


def refuse() -> None:
    raise ConfigError("partitions", 9, "too many")


def die() -> None:
    os._exit(7)


def test_it_computes_elsewhere() -> None:
    pid, value = apart(pid_and, value=3)
    assert value == 3
    assert pid != os.getpid()


def test_what_a_user_caused_comes_back_as_it_is() -> None:
    with pytest.raises(ConfigError, match="partitions=9: too many"):
        apart(refuse)


def test_a_death_is_an_error() -> None:
    with pytest.raises(RankFailedError, match="exit code 7"):
        apart(die)
