"""What every rank did when, as a picture and as a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpipe_cli.pipeline.policies import make_schedule
from gpipe_cli.pipeline.schedule import Event, Operation, OperationKind
from gpipe_cli.reporting.timeline import draw_timeline, idle_fraction, write_trace


def lockstep(num_stages: int, num_micro_batches: int) -> list[list[Event]]:
    """Forward passes of one second each, a stage after the other, from the 100th second on."""
    return [
        [Event(Operation(stage, OperationKind.FORWARD, m), 100.0 + stage + m, 101.0 + stage + m)
         for m in range(num_micro_batches)]
        for stage in range(num_stages)
    ]  # fmt: skip


def test_idle_time_is_the_papers_bubble() -> None:
    assert idle_fraction(lockstep(4, 8)) == pytest.approx(3 / 11)
    assert idle_fraction(lockstep(1, 3)) == 0


def test_the_trace_has_a_track_a_rank_with_times_in_microseconds(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", lockstep(2, 3), "two ranks")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    boxes = [record for record in records if record["ph"] == "X"]
    assert [(box["tid"], box["ts"], box["dur"]) for box in boxes[2:4]] == [(0, 2e6, 1e6), (1, 1e6, 1e6)]
    assert boxes[3]["name"] == "1F0"
    assert boxes[3]["args"] == {"kind": "forward", "stage": 1, "micro_batch": 0}
    names = [record["args"]["name"] for record in records if record["ph"] == "M"]
    assert names == ["two ranks", "rank 0", "rank 1"]


def test_the_picture_is_drawn_for_several_stages_a_rank_and_every_kind(tmp_path: Path) -> None:
    for policy in ("gpipe", "zero_bubble"):
        schedule = make_schedule(4, 3, policy, "full", num_ranks=2)
        ranks = [
            [Event(op, float(place), place + 0.9) for place, op in enumerate(operations)]
            for operations in schedule.operations
        ]
        draw_timeline(tmp_path / f"{policy}.png", ranks, "four stages on two ranks")
        assert (tmp_path / f"{policy}.png").read_bytes().startswith(b"\x89PNG")
        write_trace(tmp_path / "trace.json", ranks, policy)
        kinds = {box.get("cat") for box in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
        assert ("gradients of weights" in kinds) == (policy == "zero_bubble")


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one event"):
        draw_timeline(tmp_path / "picture.png", [[], []], "nothing")
    assert list(tmp_path.iterdir()) == []
