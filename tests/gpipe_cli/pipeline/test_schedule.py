"""What is read off a schedule: the work of a stage, and its grid."""

from __future__ import annotations

from gpipe_cli.pipeline.policies import make_schedule
from gpipe_cli.pipeline.schedule import format_schedule, stage_weights


def test_the_grid_marks_one_operation():
    assert format_schedule(make_schedule(1, 1), 0, 1) == "rank 0: 0F0 [0B0]"


def test_a_stage_weighs_what_the_schedule_lets_it_do():
    assert stage_weights(make_schedule(2, 4, "gpipe", "none")) == (1.0, 1.0)
    assert stage_weights(make_schedule(2, 4, "1f1b", "full")) == (16 / 12, 1.0)
    assert stage_weights(make_schedule(2, 4, "gpipe", "full")) == (15 / 12, 15 / 12)
