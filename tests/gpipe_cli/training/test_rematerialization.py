"""Budgets of remat=auto: where they come from, what counts against them, and what is said when they are too small."""

from __future__ import annotations

import re
from functools import partial
from importlib import resources
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from gpipe_cli.catalogue import CONFIG_PACKAGE
from gpipe_cli.config import OptimizerConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline import make_schedule
from gpipe_cli.training import rematerialization
from gpipe_cli.training.rematerialization import (
    GB,
    PROCESS_BYTES,
    budgets_of_ranks,
    count_for_budget,
    found_budget,
    given_budget,
    keep_within,
)

LAYERS = [(f"block_{index}", partial(nn.Sequential, nn.Linear(64, 64), nn.Tanh())) for index in range(4)]
CPU = torch.device("cpu")
SGD = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.0)
NUM_PARAMETERS, VALUE = 4 * (64 * 64 + 64), 8 * 64 * 4  # bytes of one layer's output for a micro-batch of 8


@pytest.fixture(scope="module")
def counted():
    return count_for_budget(LAYERS, torch.empty(1, 64, device="meta"), "fp32", "cpu")


def keep(counted, budgets, partitions=1, optimizer=SGD, **options):
    schedule = make_schedule(partitions, 4, "gpipe", "full")
    balance = [4 // partitions] * partitions
    return keep_within(
        budgets, counted, balance=balance, schedule=schedule, batch_size=32, optimizer=optimizer, **options
    )


def test_a_budget_leaves_room_for_the_process_or_for_the_allocator():
    cpu, gpu = given_budget(2, "cpu"), given_budget(2, "cuda")
    assert (cpu.tensor_bytes, gpu.tensor_bytes) == (1.5e9, 1.8e9)
    for budget in (cpu, gpu):
        assert budget.needed_bytes(budget.tensor_bytes) == budget.memory_bytes


def test_a_process_takes_what_plan_reserves_for_it():
    text = (resources.files(CONFIG_PACKAGE) / "hardware" / "cpu.yaml").read_text()
    assert yaml.safe_load(text)["reserved_gb"] * GB == PROCESS_BYTES


def test_where_nothing_is_said_the_machines_memory_is_shared_out(monkeypatch):
    monkeypatch.setattr(rematerialization, "total_memory_bytes", lambda: 12_000_000_000)
    assert found_budget(CPU, 3).memory_bytes == 4e9
    assert [budget.memory_bytes for budget in budgets_of_ranks(None, CPU, None)] == [12e9]
    assert [budget.memory_bytes for budget in budgets_of_ranks(2.0, CPU, None)] == [2e9]


def test_a_system_that_does_not_tell_its_memory_needs_a_number(monkeypatch):
    def fails() -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(rematerialization, "total_memory_bytes", fails)
    with pytest.raises(
        ConfigError, match=r"^remat=auto: this system does not tell how much memory it has; add memory_gb"
    ):
        found_budget(CPU, 1)


def test_on_a_gpu_it_is_what_is_free_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index * 10**9, 10**12))
    assert found_budget(torch.device("cuda", 3), 1).tensor_bytes == 2.7e9


def test_weights_gradients_optimizer_and_average_count(counted):
    budgets = [given_budget(4, "cpu")]
    kept = keep(counted, budgets)
    assert kept.kept == (4,)
    adam = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.0)
    assert keep(counted, budgets, optimizer=adam).rank_bytes[0] - kept.rank_bytes[0] == 8 * NUM_PARAMETERS
    assert keep(counted, budgets, averaged=True).rank_bytes[0] - kept.rank_bytes[0] == 4 * NUM_PARAMETERS


def test_more_memory_keeps_more(counted):
    [everything] = keep(counted, [given_budget(4, "cpu")]).rank_bytes
    counts = []
    for missing in range(4):
        bytes_ = everything - missing * 4 * VALUE + PROCESS_BYTES
        kept = keep(counted, [given_budget(bytes_ / GB, "cpu")])
        assert kept.rank_bytes[0] <= bytes_ - PROCESS_BYTES
        counts.append(kept.kept[0])
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 4
    assert counts[-1] < 4


def test_too_little_says_how_much_is_needed_and_that_is_enough(counted):
    with pytest.raises(ConfigError) as caught:
        keep(counted, [given_budget(0.5001, "cpu")])
    text = str(caught.value)
    assert text.startswith("memory_gb=0.5001: rank 0 needs 0.501 GB even if everything is recomputed (0.5 of it for ")
    assert text.endswith("; use that, or more micro_batches or partitions, or a smaller batch_size or model")
    needed = float(re.findall(r"needs ([\d.]+) GB", text)[0])
    assert keep(counted, [given_budget(needed, "cpu")]).kept[0] >= 0


def test_the_rank_that_lacks_most_is_named(counted):
    small = SimpleNamespace(memory_bytes=1000.0, on_gpu=True, source="free on its GPU", tensor_bytes=1000.0)
    small.needed_bytes = lambda tensor_bytes: tensor_bytes
    with pytest.raises(
        ConfigError, match=r"^remat=auto: rank 1 needs .* and has 0.00 GB \(free on its GPU\); use more"
    ):
        keep(counted, [given_budget(4, "cuda"), small], partitions=2)


def test_layers_that_cannot_be_counted_are_one_line():
    class Looks(nn.Module):
        def forward(self, x):
            return x * float(x.detach().sum())

    with pytest.raises(
        ConfigError, match=r"^remat=auto: counting the layers' activations failed \(.*\); use remat=full"
    ):
        count_for_budget([("looks", Looks)], torch.empty(1, 4, device="meta"), "fp32", "cpu")


def test_the_decision_is_told_in_numbers(counted):
    budgets = [given_budget(0.75, "cpu")] * 2
    kept = keep(counted, budgets, partitions=2)
    schedule = make_schedule(2, 4, "gpipe", "auto", kept=[3, 0])
    assert kept.sentence(schedule) == (
        "remat=auto keeps 3+1 of 4 micro-batches, counted to take 0.50+0.50 GB of 0.75 GB a rank (memory_gb)"
    )
