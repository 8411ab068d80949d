"""Which rows there are, what each is compared with, and which cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_cli.benchmark.grid import baseline_of, grid, groups, reference_of, why_impossible, with_baselines


@pytest.fixture
def case(config):
    [one] = grid(config("partitions=2", "micro_batches=4", "remat=full"))
    return one


def test_the_grid_is_every_combination_by_micro_batches(config) -> None:
    rows = grid(config("partitions=[1,2]", "micro_batches=[1,4]", "remat=none"))
    assert [(row.micro_batches, row.partitions) for row in rows] == [(1, 1), (1, 2), (4, 1), (4, 2)]


def test_without_lists_the_grid_is_the_default_one_and_a_value_twice_is_one_row(config) -> None:
    rows = grid(config())
    assert {row.partitions for row in rows} == {1, 2}
    assert {row.micro_batches for row in rows} == {1, 4, 8}
    assert {row.remat for row in rows} == {"full", "none"}
    assert len(rows) == 12
    assert len(grid(config("partitions=[2,2]", "micro_batches=4", "remat=none"))) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"micro_batches": 9}, "only batch_size=8 samples"),
        ({"partitions": 7}, "only 6 layers"),
        ({"schedule": "interleaved", "partitions": 3}, "a multiple of ranks=2"),
        ({"taper": True, "micro_batches": 2}, "taper=true has no effect on micro_batches=2 of batch_size=8"),
        ({"taper": True, "micro_batches": 8}, "taper=true has no effect"),
        ({"taper": True}, None),
        ({"baseline": "torch", "remat": "except_last"}, "no remat=except_last"),
        ({"baseline": "torch", "micro_batches": 3}, "equal micro-batches"),
        ({"baseline": "torch", "partitions": 3}, "a process for each partition"),
        ({}, None),
        ({"baseline": "torch"}, None),
    ],
)
def test_a_row_that_cannot_be_says_why(case, changes, reason) -> None:
    found = why_impossible(replace(case, **changes), num_layers=6, num_ranks=2)
    assert (found is None) if reason is None else (reason in found)


def test_single_is_one_loop_for_all_rows_and_a_single_partition_has_no_other_baseline(case) -> None:
    other = replace(case, micro_batches=2, remat="none", partitions=1)
    assert baseline_of(case, "single") == baseline_of(other, "single")
    assert baseline_of(other, "naive") is None
    assert baseline_of(other, "torch") is None


def test_tapered_rows_stand_beside_even_ones_and_baselines_are_even(config) -> None:
    even, tapered = grid(config("partitions=2", "micro_batches=4", "remat=full", "taper=[false,true]"))
    assert (even.taper, tapered.taper) == (False, True)
    assert str(tapered) == f"{even} tapered"
    for kind in ("single", "naive", "torch"):
        assert baseline_of(tapered, kind) == baseline_of(even, kind)
    assert reference_of(tapered, [even, tapered]) is tapered


def test_naive_has_one_micro_batch_and_torch_the_same_cut(case) -> None:
    cut = replace(case, balance=(4, 2))
    naive, torch = baseline_of(cut, "naive"), baseline_of(cut, "torch")
    assert (naive.partitions, naive.micro_batches, naive.remat) == (2, 1, "full")
    assert (torch.partitions, torch.micro_batches, torch.balance) == (2, 4, (4, 2))
    assert baseline_of(replace(case, micro_batches=1), "naive") is None  # the row itself


def test_a_cut_for_another_schedule_is_not_forced_on_torch(case) -> None:
    torch = baseline_of(replace(case, schedule="eager_1f1b", balance=(4, 2)), "torch")
    assert (torch.schedule, torch.balance) == ("gpipe", None)


def test_rows_that_differ_in_partitions_take_turns_with_each_baseline_once(config) -> None:
    [first, second] = groups(grid(config("partitions=[1,2]", "micro_batches=[1,4]", "remat=none")))
    assert [row.partitions for row in second] == [1, 2]
    members = with_baselines(second, ("single", "naive", "torch"))
    assert [member.baseline for member in members] == [None, None, "single", "naive", "torch"]
    assert [member.baseline for member in with_baselines(first, ("naive",))] == [None, None]


def test_speed_up_counts_from_the_fewest_partitions_all_else_being_equal(case) -> None:
    one, other = replace(case, partitions=1, balance=(6,)), replace(case, partitions=1, micro_batches=2)
    assert reference_of(case, [case, one, other]) == one
    assert reference_of(case, [case, other]) == case


def test_a_rows_text_names_what_makes_it(case) -> None:
    assert str(case) == "K=2 M=4 remat=full"
    assert str(replace(case, schedule="1f1b", name="Pipeline-2")) == "Pipeline-2 K=2 M=4 remat=full 1f1b"
    assert str(baseline_of(case, "single")) == "baseline=single"


def test_torchs_pipeline_has_no_shared_parameters(text_config) -> None:
    [one] = grid(text_config("partitions=2", "micro_batches=4", "remat=full", "model.tied=true"))
    reason = why_impossible(replace(one, baseline="torch"), num_layers=5, num_ranks=2)
    assert reason == "ScheduleGPipe knows no parameters that are shared by stages; use model.tied=false"
    assert why_impossible(one, num_layers=5, num_ranks=2) is None
