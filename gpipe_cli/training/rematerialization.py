"""`remat=auto`: what each rank may use, and how many micro-batches' activations there is room for.

Decided before training from counts alone, on one rank for all, so every rank follows the same schedule. It changes what
is recomputed, never a result.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe_cli.distributed.devices import total_memory_bytes
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.counting import Loss, NetworkCount, count_network
from gpipe_cli.pipeline.footprint import footprints, footprints_by_micro_batch
from gpipe_cli.pipeline.layers import named_layers
from gpipe_cli.pipeline.partition import check_balance, cut
from gpipe_cli.pipeline.policies import make_schedule, weights_for_cut
from gpipe_cli.pipeline.rematerialization import keep_what_fits
from gpipe_cli.pipeline.schedule import Schedule, num_not_recomputed
from gpipe_cli.pipeline.sizes import split_sizes
from gpipe_cli.training.communication import from_all, from_first
from gpipe_cli.training.language_loss import CountedLanguageLoss
from gpipe_cli.training.optimizer_memory import FLOAT_BYTES, bytes_per_parameter

if TYPE_CHECKING:
    from gpipe_cli.config import OptimizerConfig, TrainConfig
    from gpipe_cli.distributed.launch import RankContext
    from gpipe_cli.pipeline import Layers, ProcessGroups
    from gpipe_cli.training.task import Task

GB = 1e9
# Resident memory of a process that has imported PyTorch: measured, the same as in conf/hardware/cpu.yaml.
PROCESS_BYTES = 0.5 * GB
# The share of a GPU's memory that tensors are counted on to fill: the allocator's fragments and the workspaces of
# cuDNN need the rest (an assumption, to be on the safe side).
GPU_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one rank may use. `source`: in words, where the number comes from."""

    memory_bytes: float
    on_gpu: bool
    source: str

    @property
    def tensor_bytes(self) -> float:
        """What weights, optimizer and activations may take of it."""
        return self.memory_bytes * GPU_SHARE if self.on_gpu else self.memory_bytes - PROCESS_BYTES

    def needed_bytes(self, tensor_bytes: float) -> float:
        """The smallest budget that has room for so many bytes of tensors."""
        return tensor_bytes / GPU_SHARE if self.on_gpu else tensor_bytes + PROCESS_BYTES


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept: `kept` is Pipeline's argument; `rank_bytes` what each rank's tensors then take of its budget."""

    kept: tuple[int, ...]
    rank_bytes: tuple[int, ...]
    budgets: tuple[Budget, ...]

    def sentence(self, schedule: Schedule) -> str:
        """For the screen; `schedule` is the one that was made of it."""
        num = schedule.num_micro_batches
        counts = "+".join(map(str, num_not_recomputed(schedule)))
        used = "+".join(
            f"{budget.needed_bytes(used) / GB:.2f}" for used, budget in zip(self.rank_bytes, self.budgets, strict=True)
        )
        least = min(self.budgets, key=lambda budget: budget.memory_bytes)
        return (
            f"remat=auto keeps {counts} of {num} micro-batches, counted to take {used} GB "
            f"of {least.memory_bytes / GB:.2f} GB a rank ({least.source})"
        )


def cut_and_keep(
    config: TrainConfig,
    context: RankContext,
    groups: ProcessGroups | None,
    task: Task,
    layers: Layers,
    costs: Sequence[float] | None,
) -> tuple[tuple[int, ...], Kept]:
    """Layers of each partition, and what each keeps; `costs`: of the layers, None where nothing is to be cut.

    Collective: the first rank decides. Raises ConfigError as `count_for_budget` and `keep_within`, ValueError for a cut
    or a schedule that cannot be.
    """
    num_layers, num_ranks = len(named_layers(layers)), 1 if groups is None else len(groups.ranks)
    schedule = make_schedule(
        config.partitions, config.micro_batches, config.schedule, "full", num_ranks, taper=config.taper
    )
    if config.balance is not None:
        balance = check_balance(config.balance, num_layers, config.partitions)
    else:
        weights = weights_for_cut(
            config.partitions, config.micro_batches, config.schedule, "auto", num_ranks, config.taper
        )
        balance = cut(costs if costs is not None else [1.0] * num_layers, config.partitions, weights)
    device = torch.device(context.device)
    budgets = budgets_of_ranks(config.memory_gb, device, groups)

    def decide() -> Kept:
        return keep_within(
            budgets,
            count_for_budget(layers, task.sample(1, meta=True), config.precision, device.type),
            balance=balance,
            schedule=schedule,
            batch_size=config.batch_size,
            optimizer=config.optimizer,
            averaged=config.ema_decay > 0,
        )

    return balance, from_first(groups, decide)


def given_budget(memory_gb: float, device_type: str) -> Budget:
    """The budget of the setting `memory_gb`."""
    return Budget(memory_bytes=memory_gb * GB, on_gpu=device_type == "cuda", source="memory_gb")


def found_budget(device: torch.device, num_local_ranks: int) -> Budget:
    """What there is where nothing is said. Raises ConfigError on a system that does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Budget(memory_bytes=free, on_gpu=True, source="free on its GPU; memory_gb sets another")
    try:
        total = total_memory_bytes()
    except (ValueError, OSError):
        raise ConfigError(
            "remat", "auto", "this system does not tell how much memory it has; add memory_gb=8, say"
        ) from None
    source = "this machine's memory, shared out; memory_gb sets another"
    return Budget(memory_bytes=total / num_local_ranks, on_gpu=False, source=source)


def budgets_of_ranks(memory_gb: float | None, device: torch.device, groups: ProcessGroups | None) -> tuple[Budget, ...]:
    """Every rank's budget. Collective."""
    if memory_gb is not None:
        return (given_budget(memory_gb, device.type),) * (1 if groups is None else len(groups.ranks))
    host = socket.gethostname()
    neighbours = from_all(groups, host).count(host)
    return tuple(from_all(groups, found_budget(device, neighbours)))


def count_for_budget(layers: Layers, sample: Tensor, precision: str, device_type: str) -> NetworkCount:
    """What the layers keep for their backward passes; `sample`: one made-up sample, (1, ...), on the meta device.

    Raises ConfigError for layers that cannot be counted.
    """
    try:
        return count_network(
            layers,
            sample,
            activation_width=0.5 if precision == "bf16" else 1.0,
            fused_attention=device_type != "cpu",
            loss=Loss if sample.is_floating_point() else CountedLanguageLoss,  # tokens are whole numbers
        )
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        problem = f"counting the layers' activations failed ({str(error).splitlines()[0]}); use remat=full, or none"
        raise ConfigError("remat", "auto", problem) from error


def keep_within(
    budgets: Sequence[Budget],
    network: NetworkCount,
    *,
    balance: Sequence[int],
    schedule: Schedule,
    batch_size: int,
    optimizer: OptimizerConfig,
    averaged: bool = False,
) -> Kept:
    """How much each stage keeps. `schedule`: of the mini-batch, with any remat; `averaged`: a moving average of the
    weights is held as well.

    Raises ConfigError when a rank has too little memory even if everything is recomputed.
    """
    num = schedule.num_micro_batches
    stages = (
        footprints_by_micro_batch(network, balance, split_sizes(batch_size, num, tapered=True), batch_size)
        if schedule.tapered
        else footprints(network, balance, math.ceil(batch_size / num), batch_size)
    )
    decision = keep_what_fits(
        stages,
        schedule,
        bytes_per_parameter(optimizer) + (FLOAT_BYTES if averaged else 0),
        [budget.tensor_bytes for budget in budgets],
    )
    excess = [least - budget.tensor_bytes for least, budget in zip(decision.least_bytes, budgets, strict=True)]
    rank = max(range(len(excess)), key=excess.__getitem__)
    if excess[rank] > 0:
        raise _too_small(rank, budgets[rank], decision.least_bytes[rank])
    return Kept(kept=decision.kept, rank_bytes=decision.rank_bytes, budgets=tuple(budgets))


def _too_small(rank: int, budget: Budget, least_bytes: int) -> ConfigError:
    needed = math.ceil(budget.needed_bytes(least_bytes) / GB * 1000) / 1000
    part = "a tenth of it kept free" if budget.on_gpu else f"{PROCESS_BYTES / GB:g} of it for the process itself"
    remedy = "more micro_batches or partitions, or a smaller batch_size or model"
    if budget.source == "memory_gb":
        problem = f"rank {rank} needs {needed:g} GB even if everything is recomputed ({part}); use that, or {remedy}"
        return ConfigError("memory_gb", budget.memory_bytes / GB, problem)
    has = f"{budget.memory_bytes / GB:.2f} GB ({budget.source})"
    problem = f"rank {rank} needs {needed:g} GB even if everything is recomputed, and has {has}; use {remedy}"
    return ConfigError("remat", "auto", problem)
