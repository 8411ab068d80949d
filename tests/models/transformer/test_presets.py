from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from gpipe_cli.models.transformer.layers import Block
from gpipe_cli.models.transformer.presets import PRESETS, Preset


def num_parameters(preset: Preset) -> int:
    """Counted on modules without memory, one of every kind of layer."""
    total = 0
    for factory, number in Counter(factory for _, factory in preset.layers()).items():
        with torch.device("meta"):
            total += number * sum(parameter.numel() for parameter in factory().parameters())
    return total


@pytest.mark.parametrize(("name", "reported"), [("282m", 282.2e6), ("786m", 785.8e6)])
def test_exact_figures_of_table_1_are_met_within_a_thousandth(name: str, reported: float) -> None:
    assert num_parameters(PRESETS[name]) == pytest.approx(reported, rel=1e-3)


@pytest.mark.parametrize("name", ["282m", "5.3b", "21b", "83.9b"])
def test_counts_are_the_papers_as_far_as_it_prints_them(name: str) -> None:
    preset = PRESETS[name]
    assert preset.reported_parameters is not None
    number, unit = preset.reported_parameters[:-1], {"M": 1e6, "B": 1e9}[preset.reported_parameters[-1]]
    assert f"{num_parameters(preset) / unit:.1f}" == number


def test_ten_blocks_are_the_difference_of_the_papers_exact_figures() -> None:
    with torch.device("meta"):
        block = sum(parameter.numel() for parameter in Block(2048, 32, 8192, 0.1, 1.0).parameters())
    assert 10 * block == pytest.approx((785.8 - 282.2) * 1e6, abs=0.1e6 + 1)


def test_8b_is_the_nearest_number_of_layers_of_the_papers_width() -> None:
    counts = {layers: num_parameters(Preset(num_layers=layers, source="")) for layers in (155, 156, 157)}
    nearest = min(counts, key=lambda layers: abs(counts[layers] - 8e9))
    assert nearest == PRESETS["8b"].num_layers


def test_the_largest_network_is_counted_without_memory_in_a_second() -> None:
    began = time.process_time()
    assert num_parameters(PRESETS["83.9b"]) == 83_863_291_136
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_on_meta_tensors(name: str) -> None:
    preset = PRESETS[name]
    with torch.device("meta"):
        value = torch.empty(2, preset.seq_len, dtype=torch.int64)
        seen: dict[object, torch.Tensor] = {}
        for _, factory in preset.layers():
            if factory not in seen:
                seen[factory] = value = factory().train()(value)
    assert value.shape == (2, preset.seq_len, preset.vocab_size)
