"""Which of several failures is reported as the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpipe_cli.distributed.failures import Failure, describe, first_cause, is_peer_failure
from gpipe_cli.errors import ConfigError, RankFailedError, TrainingError

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:38611"
PEER_GONE = RuntimeError(GLOO)


def failure(rank: int, exception: BaseException, time_s: float) -> Failure:
    return replace(Failure.of(rank, exception), time_s=time_s)


@pytest.mark.parametrize(
    "text",
    [
        GLOO,
        "[pair.cc:589] Read error [127.0.0.1]:24533: Connection reset by peer",
        "[pair.cc:446] writev [127.0.0.1]:1234: Broken pipe",
        "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Timed out waiting 1800000ms for recv operation to complete",
    ],
)
def test_lost_connections_to_other_ranks_are_recognised(text: str) -> None:
    assert is_peer_failure(RuntimeError(text))


@pytest.mark.parametrize(
    "exception",
    [
        ConnectionResetError("Connection reset by peer"),  # of a download
        OSError("Broken pipe"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        TrainingError("Connection closed by peer"),
        KeyError("timed out waiting"),
    ],
)
def test_failures_of_the_rank_itself_are_not_taken_for_lost_connections(exception: Exception) -> None:
    assert not is_peer_failure(exception)


def test_a_lost_connection_is_recognised_behind_the_error_that_it_caused() -> None:
    error = ValueError("no gradient")
    error.__cause__ = PEER_GONE
    assert is_peer_failure(error)


def test_the_earliest_failure_is_the_cause() -> None:
    failures = [failure(2, KeyError("first"), 1.0), failure(0, ValueError("second"), 2.0)]
    cause, traceback = first_cause(failures, {0: 1})
    assert str(cause) == "rank 2: KeyError: 'first'"
    assert "KeyError: 'first'" in traceback


def test_a_lost_connection_is_not_the_cause_even_if_it_was_noticed_earlier() -> None:
    failures = [failure(0, PEER_GONE, 1.0), failure(1, TrainingError("the loss is not a number"), 2.0)]
    cause, traceback = first_cause(failures, {0: 1})
    assert isinstance(cause, TrainingError)
    assert traceback == ""


def test_an_error_of_the_user_keeps_its_class_and_facts(tmp_path: Path) -> None:
    Failure.of(3, ConfigError("partitions", 9, "the network has 8 layers")).write(tmp_path)
    cause, _ = first_cause(Failure.read_all(tmp_path), {3: 1})
    assert isinstance(cause, ConfigError)
    assert (cause.key, cause.value, cause.exit_code) == ("partitions", 9, 2)


def test_a_killed_rank_is_the_cause_whatever_its_neighbours_say() -> None:
    cause, _ = first_cause([failure(0, ValueError("half a tensor"), 1.0)], {1: -11})
    assert str(cause) == "rank 1: killed by signal 11 (SIGSEGV)"


def test_an_abort_gives_way_to_a_failure_that_was_recorded() -> None:
    cause, _ = first_cause([failure(0, ValueError("the reason"), 1.0)], {1: -6})
    assert str(cause) == "rank 0: ValueError: the reason"
    assert "SIGABRT" in str(first_cause([failure(0, PEER_GONE, 1.0)], {1: -6})[0])


def test_with_lost_connections_alone_the_first_of_them_is_told() -> None:
    cause, _ = first_cause([failure(1, PEER_GONE, 1.0), failure(0, PEER_GONE, 2.0)], {0: 1})
    assert isinstance(cause, RankFailedError)
    assert str(cause).startswith("rank 1: lost the connection to another rank")


def test_records_come_back_in_order_of_time(tmp_path: Path) -> None:
    for rank, time_s in enumerate((3.0, 1.0, 2.0)):
        failure(rank, ValueError(rank), time_s).write(tmp_path)
    assert [record.rank for record in Failure.read_all(tmp_path)] == [1, 2, 0]


def test_a_description_is_one_line() -> None:
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(AssertionError()) == "AssertionError"
