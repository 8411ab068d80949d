"""The paper's tables as rows: the sizes are the paper's."""

from __future__ import annotations

import pytest

from gpipe_cli.benchmark.suites import suite_cases
from gpipe_cli.compose import load
from gpipe_cli.errors import ConfigError


def rows(*words: str):
    return suite_cases(load("bench", list(words)))


def test_table_2_is_amoebanet_d_18_256_over_partitions_and_micro_batches() -> None:
    cases = rows("suite=table2")
    assert [(case.partitions, case.micro_batches) for case in cases] == [
        (k, m) for m in (1, 4, 32) for k in (2, 4, 8)
    ]  # fmt: skip
    assert {(case.model.variant, case.model.layers, case.model.filters, case.model.aux_head) for case in cases} == {
        ("D", 18, 256, False)
    }
    assert {(case.image_size, case.batch_size, case.remat) for case in cases} == {(224, 128, "full")}


def test_table_1_has_the_papers_largest_networks() -> None:
    cases = rows("suite=table1")
    assert [(case.name, case.model.layers, case.model.filters, case.partitions) for case in cases] == [
        ("Naive-1", 18, 208, 1),
        ("Pipeline-1", 18, 416, 1),
        ("Pipeline-2", 18, 544, 2),
        ("Pipeline-4", 36, 544, 4),
        ("Pipeline-8", 72, 512, 8),
    ]
    assert [case.remat for case in cases] == ["none", "full", "full", "full", "full"]


def test_torchgpipes_rows_have_its_batches_and_cuts() -> None:
    cases = {(case.partitions, case.micro_batches): case for case in rows("suite=torchgpipe")}
    assert (cases[2, 32].batch_size, cases[2, 32].balance, cases[2, 32].remat) == (1280, (9, 15), "except_last")
    assert (cases[2, 1].batch_size, cases[2, 1].balance) == (96, (7, 17))


def test_settings_choose_among_the_rows_and_change_the_network() -> None:
    [case] = rows("suite=table3", "partitions=2", "batch_size=64", "model.layers=3", "model.filters=16")
    assert (case.partitions, case.micro_batches, case.batch_size, case.model.filters) == (2, 32, 64, 16)


def test_a_choice_that_leaves_no_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="suite=table3: no row has these"):
        rows("suite=table3", "micro_batches=4")


def test_table_1_sets_the_sizes_of_amoebanet_only() -> None:
    with pytest.raises(ConfigError, match="suite=table1: is for model=amoebanet_d"):
        rows("suite=table1", "model=module", "model.factory=a:b")
