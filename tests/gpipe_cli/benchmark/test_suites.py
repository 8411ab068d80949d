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
    with pytest.raises(ConfigError, match="suite=table1: is for model=amoebanet_d and model=transformer"):
        rows("suite=table1", "model=module", "model.factory=a:b")


def test_with_a_transformer_the_tables_have_its_columns() -> None:
    cases = rows("suite=table2", "model=transformer")
    papers = [case for case in cases if case.name is None]
    assert [(case.partitions, case.micro_batches) for case in papers] == [(k, m) for m in (1, 4, 32) for k in (2, 4, 8)]
    assert {(case.model.layers, case.model.width, case.seq_len, case.batch_size) for case in papers} == {
        (48, 2048, 1024, 32)
    }
    assert {(case.image_size, case.num_classes) for case in cases} == {(None, 32_000)}
    assert [(case.partitions, case.micro_batches) for case in rows("suite=table3", "model=transformer")] == [
        (2, 32), (4, 32), (8, 32),
    ]  # fmt: skip
    assert [case.model.layers for case in rows("suite=table1", "model=transformer")] == [3, 13, 103, 415, 1663]


def test_the_announcements_8_billion_parameters_on_16_accelerators_are_rows_of_table_2() -> None:
    claim = [case for case in rows("suite=table2", "model=transformer") if case.name == "8B"]
    assert [(case.partitions, case.micro_batches, case.model.layers) for case in claim] == [(16, 1, 156), (16, 32, 156)]
    # A Transformer of other sizes does not have 8 billion.
    assert not [case for case in rows("suite=table2", "model=transformer", "model.width=64") if case.name == "8B"]


def test_a_table_without_transformers_says_so() -> None:
    with pytest.raises(ConfigError, match="suite=torchgpipe: has no columns for model=transformer; use suite=table2"):
        rows("suite=torchgpipe", "model=transformer")
