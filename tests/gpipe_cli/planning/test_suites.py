"""The paper's columns: parameter memory, and the shape of its speed-ups."""

from __future__ import annotations

import pytest

from gpipe_cli.commands.plan import _find_hardware
from gpipe_cli.compose import load
from gpipe_cli.planning.suite_text import TABLE, describe_suite, update_plan_table
from gpipe_cli.planning.suites import run_suite
from gpipe_cli.reporting.paper import GIB, TABLE1, TABLE2, TABLE3, TORCHGPIPE
from gpipe_cli.reporting.tables import read

# The paper's memory is not 12 bytes times the parameters that it states in these two: 82M x 12 = 0.98 GB, not 1.05;
# 1.8B x 12 = 21.6 GB, not 24.62. No network with its number of parameters comes within 2 % of that.
NOT_12_BYTES = ("Naive-1", "Pipeline-8")


@pytest.fixture(scope="module")
def suites():
    return {name: run_suite(load("plan", [f"suite={name}"]), _find_hardware) for name in ("table1", "table2")}


def amoebanet(rows):
    return [row for row in rows if row.architecture == "amoebanet"]


def transformer(rows):
    return [row for row in rows if row.architecture == "transformer" and (row.speed is None or row.speed.name is None)]


def claim(rows):
    return [row for row in rows if row.speed is not None and row.speed.name == "8B"]


@pytest.mark.parametrize("size", [size for size in TABLE1 if size.architecture == "amoebanet"], ids=lambda s: s.name)
def test_parameter_memory_is_the_papers(suites, size):
    (row,) = [row for row in amoebanet(suites["table1"]) if row.name == size.name]
    assert row.plan.parameter_bytes == 12 * row.plan.num_parameters
    assert row.plan.parameter_bytes == pytest.approx(size.torchgpipe_parameter_bytes, rel=0.02)
    if size.name not in NOT_12_BYTES:
        assert row.plan.parameter_bytes == pytest.approx(size.parameter_bytes, rel=0.02)
        assert row.plan.num_parameters == pytest.approx(size.num_parameters, rel=0.02)
    else:
        assert 12 * size.num_parameters != pytest.approx(size.parameter_bytes, rel=0.05)


def test_parameter_counts_are_exact(suites):
    counts = [row.plan.num_parameters for row in amoebanet(suites["table1"])]
    assert counts == [81_139_629, 317_564_584, 540_240_600, 1_053_338_136, 1_842_648_616]


def test_every_pipeline_column_fits_the_papers_accelerators(suites):
    assert all(row.plan.fits for row in amoebanet(suites["table1"]) if row.name.startswith("Pipeline"))


def test_activations_are_shown_beside_the_papers(suites):
    lines = describe_suite(suites["table1"])
    header = next(line for line in lines if line.startswith("column"))
    for heading in ("activations GB", "paper", "torchgpipe", "off %", "fits"):
        assert heading in header
    assert sum(line.startswith(("Naive", "Pipeline")) for line in lines) == len(TABLE1)
    assert all("SIMULATED" in line for line in lines if "beside reported" in line)
    assert "M; 32 here" in " ".join(lines)


def test_table_2_speeds_up_with_partitions_and_micro_batches(suites):
    rows = {(r.plan.choice.partitions, r.plan.choice.micro_batches): r for r in amoebanet(suites["table2"])}
    assert rows[2, 1].relative == 1
    for partitions in (2, 4, 8):
        assert rows[partitions, 1].relative < rows[partitions, 4].relative
    for micro_batches in (4, 32):
        assert rows[2, micro_batches].relative < rows[4, micro_batches].relative < rows[8, micro_batches].relative
    assert all(row.relative < row.plan.choice.partitions for row in rows.values())


def test_torchgpipes_throughput_is_predicted():
    rows = run_suite(load("plan", ["suite=torchgpipe"]), _find_hardware)
    for row, reported in zip(rows, TORCHGPIPE, strict=True):
        assert row.plan.balance == reported.balance
        # One figure was fitted; the worst row, K=4 M=4, is off by a third.
        assert row.plan.samples_per_s == pytest.approx(reported.relative * 26.7, rel=0.4)
    assert sum(abs(row.relative / row.speed.relative - 1) < 0.2 for row in rows) >= 7


def test_the_reported_figures_are_those_of_the_tables():
    assert [row.relative for row in TABLE2 if row.architecture == "amoebanet"] == [
        1, 1.13, 1.38, 1.07, 1.26, 1.72, 1.21, 1.84, 3.48,
    ]  # fmt: skip
    assert [row.relative for row in TABLE3 if row.architecture == "transformer"] == [1, 1.8, 3.3]
    assert [(row.accelerators, row.micro_batches) for row in TORCHGPIPE[:4]] == [(2, 1), (4, 1), (8, 1), (2, 4)]


def test_the_table_is_written_and_marked_simulated(suites, tmp_path):
    update_plan_table(tmp_path, suites["table2"], "gpipe plan suite=table2")
    update_plan_table(tmp_path, suites["table1"], "gpipe plan suite=table1")
    update_plan_table(tmp_path, suites["table1"], "gpipe plan suite=table1")
    rows = read(tmp_path, TABLE)
    assert len(rows) == len(suites["table1"]) + len(suites["table2"])
    assert {row["kind"] for row in rows} == {"simulated"}
    assert all(row["command_line"] and row["source"] for row in rows)
    page = (tmp_path / "plan.md").read_text(encoding="utf-8")
    assert "simulated" in page
    assert "`gpipe plan suite=table1`" in page


def test_the_transformers_columns_are_predicted_with_adam_and_their_own_batch(suites):
    rows = transformer(suites["table1"])
    assert [(row.model.layers, row.plan.choice.partitions) for row in rows] == [
        (3, 1), (13, 1), (103, 8), (415, 32), (1663, 128),
    ]  # fmt: skip
    assert {row.plan.choice.batch_size for row in rows} == {32}
    for row in rows:
        assert row.size is not None
        # As many digits as the paper prints.
        assert row.plan.num_parameters == pytest.approx(row.size.num_parameters, rel=4e-3)
    assert [row.plan.fits for row in rows] == [False, True, True, True, True]


def test_the_papers_gigabytes_are_binary_in_the_transformers_columns(suites):
    """Only so are they 12 bytes a parameter; in Naive-1 the figures of parameters and activations changed places."""
    naive, *others = transformer(suites["table1"])
    for row in others:
        assert row.size is not None
        assert row.plan.parameter_bytes == 12 * row.plan.num_parameters
        assert row.plan.parameter_bytes == pytest.approx(row.size.parameter_bytes, rel=3e-3)
    assert naive.size is not None
    assert naive.plan.parameter_bytes == pytest.approx(naive.size.activation_bytes, rel=3e-3)
    assert naive.size.parameter_bytes == 11.7 * GIB
    lines = describe_suite(suites["table1"])
    header, first = lines[lines.index(next(line for line in lines if "transformer on" in line)) + 2 :][:2]
    assert "their GiB" in header
    assert "torchgpipe" not in header
    assert first.split()[:7] == ["Naive-1", "3", "1", "282.2M", "282.2M", "3.15", "11.70"]
    assert "changed places" in " ".join(lines)


@pytest.mark.parametrize("suite", ["table1", "table2"])
def test_the_8_billion_parameters_on_16_accelerators_are_a_row(suites, suite):
    naive, pipelined = claim(suites[suite])
    for row in (naive, pipelined):
        assert row.plan.choice.partitions == 16
        assert row.plan.num_parameters == pytest.approx(8e9, rel=5e-3)
        assert row.plan.hardware.name == "tpu_v3"
    assert pipelined.plan.fits
    assert (naive.relative, pipelined.speed.relative) == (1, 11)
    assert 8 < pipelined.relative < 16 * 32 / (32 + 15)
    text = " ".join(describe_suite(suites[suite]))
    assert "transformer of 8B on tpu_v3: SIMULATED beside reported" in text
    assert "11 times as fast on 16 TPUv3, not as what" in text


def test_table_2_has_the_transformer_of_48_blocks(suites):
    rows = {(r.plan.choice.partitions, r.plan.choice.micro_batches): r for r in transformer(suites["table2"])}
    assert len(rows) == 9
    assert {(row.model.layers, row.plan.choice.batch_size) for row in rows.values()} == {(48, 32)}
    for micro_batches in (4, 32):
        assert rows[2, micro_batches].relative < rows[4, micro_batches].relative < rows[8, micro_batches].relative
    assert rows[8, 32].relative == pytest.approx(rows[8, 32].speed.relative, rel=0.25)


def test_table_3_has_both_networks():
    rows = run_suite(load("plan", ["suite=table3"]), _find_hardware)
    assert [row.relative for row in transformer(rows)] == pytest.approx([1, 1.8, 3.3], rel=0.1)
    assert len(amoebanet(rows)) == len(transformer(rows)) == 3
