"""Rates of this machine are measured, plausible, and shared out among the ranks."""

from __future__ import annotations

import dataclasses

import pytest

from gpipe_cli.planning import cpu
from gpipe_cli.planning.cpu import Rates, measure, measured


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_measured_rates_are_plausible(num_ranks, monkeypatch):
    monkeypatch.setattr(cpu, "MEASURED_S", 0.02)
    rates = measure(num_ranks, "fp32", 1)
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e7 < rates.bytes_per_s < 1e13
    assert 1e8 < rates.stream_bytes_per_s < 1e13
    assert 0 < rates.overhead_s < 1e-2
    assert (0 < rates.link_latency_s < 1) == (num_ranks > 1)


@pytest.fixture
def rates(monkeypatch) -> Rates:
    found = Rates(1e11, 1e10, 2e10, 1e-5, 1e9, 1e-4)
    monkeypatch.setattr(cpu, "measure", lambda num_ranks, precision, num_threads: found)
    monkeypatch.setattr(cpu, "total_memory_bytes", lambda: 16_000_000_000)
    return found


def test_the_machines_memory_is_shared_out(plan_config, rates):
    config = plan_config("hardware=cpu").hardware
    hardware = measured(config, "fp32", 4, None)
    assert hardware.memory_bytes == pytest.approx(4e9 - config.reserved_gb * 1e9)
    assert (hardware.flops_per_s, hardware.bytes_per_s) == (rates.flops_per_s, rates.bytes_per_s)


def test_a_given_number_wins_over_the_measured_one(plan_config, rates):
    config = dataclasses.replace(plan_config("hardware=cpu").hardware, fp32_tflops=2.0, memory_gb=3.0)
    hardware = measured(config, "fp32", 4, None)
    assert hardware.flops_per_s == 2e12
    assert hardware.memory_bytes == pytest.approx(2.5e9)


def test_more_ranks_than_cores_get_a_share_of_them(monkeypatch):
    found = Rates(1e11, 1e10, 2e10, 1e-5, 1e9, 1e-4)
    monkeypatch.setattr(cpu, "launch", lambda worker, probes, plan: found)
    monkeypatch.setattr(cpu, "available_cores", lambda: 2)
    assert measure(2, "fp32", 1).flops_per_s == 1e11
    assert measure(8, "fp32", 1).flops_per_s == 1e11 / 4
    assert measure(8, "fp32", 1).overhead_s == 4e-5
