"""The roofline, and the hardware files."""

from __future__ import annotations

import re
from importlib import resources

import pytest
import yaml

from gpipe_cli.catalogue import CONFIG_PACKAGE, group_choices
from gpipe_cli.config_plan import HardwareConfig
from gpipe_cli.pipeline.recording import Amount, Work
from gpipe_cli.planning.hardware import described

FOLDER = resources.files(CONFIG_PACKAGE) / "hardware"
NAMES = group_choices("plan")["hardware"]


def hardware(name: str) -> HardwareConfig:
    return HardwareConfig(**yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))


def test_an_operation_is_bound_by_arithmetic_or_by_memory(round_hardware):
    computing = Work(Amount(per_sample=500), Amount(fixed=1))
    moving = Work(Amount(fixed=1), Amount(per_sample=20))
    assert round_hardware.seconds([computing], 4) == 2.0
    assert round_hardware.seconds([moving], 4) == 8.0
    assert round_hardware.seconds([computing, moving], 4) == 10.0


def test_a_transfer_takes_latency_and_bytes(round_hardware):
    assert round_hardware.transfer_s(20) == 2 + 4


def test_the_promised_accelerators_are_there():
    assert set(NAMES) == {"cpu", "p40", "p100", "v100", "a100", "h100", "h200", "tpu_v2", "tpu_v3"}


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cpu"}))
def test_every_number_of_an_accelerator_is_given_with_its_source(name):
    config = hardware(name)
    assert config.name == name
    found = described(config, "fp32")
    assert min(found.flops_per_s, found.bytes_per_s, found.link_bytes_per_s, found.memory_bytes) > 1e9
    assert found.flops_per_s < config.fp32_tflops * 1e12
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert re.search(r"# Sources?: .{20,}", text)
    for key in ("efficiency", "op_overhead_us", "reserved_gb"):  # what no data sheet says
        assert re.search(rf"{key}: \S+ # (assumed|fitted)", text)


def test_the_papers_accelerators_have_the_memory_that_it_states():
    assert hardware("tpu_v2").memory_gb == pytest.approx(8 * 2**30 / 1e9, rel=1e-3)
    assert hardware("tpu_v3").memory_gb == pytest.approx(16 * 2**30 / 1e9, rel=1e-3)
