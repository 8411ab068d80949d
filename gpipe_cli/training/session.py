"""Everything a training run consists of, built in the order in which mistakes are cheapest to find.

Nothing is written here: a setting that does not work is found before the run leaves a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gpipe_cli.distributed.heap import keep_freed_memory
from gpipe_cli.distributed.mesh import make_mesh
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline import Layers, Pipeline, ProcessGroups
from gpipe_cli.pipeline.sizes import split_sizes
from gpipe_cli.training.communication import from_first
from gpipe_cli.training.ema import WeightAverage
from gpipe_cli.training.lr_schedule import LrSchedule
from gpipe_cli.training.networks import batch_norm_lacks_values, too_small_for_batch_norm
from gpipe_cli.training.optimizer import build_optimizer
from gpipe_cli.training.rematerialization import Kept, cut_and_keep
from gpipe_cli.training.task import Task, prepare_task

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig
    from gpipe_cli.data.info import DataInfo
    from gpipe_cli.distributed.launch import RankContext


@dataclass(frozen=True, kw_only=True)
class Session:
    """One rank's part of a run."""

    config: TrainConfig
    context: RankContext
    groups: ProcessGroups | None
    task: Task
    pipe: Pipeline
    kept: Kept | None  # with remat=auto
    optimizer: torch.optim.Optimizer
    lr_schedule: LrSchedule
    average: WeightAverage | None
    progress_listeners: tuple[Any, ...]  # modules with set_progress

    @property
    def info(self) -> DataInfo:
        """Facts of the data."""
        return self.task.info

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch: whole mini-batches only."""
        return self.info.num_train // self.config.batch_size

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        planned = self.config.epochs * self.steps_per_epoch
        return planned if self.config.steps is None else min(planned, self.config.steps)


def build_session(config: TrainConfig, context: RankContext) -> Session:
    """Data facts from the first rank, then network, cut, pipeline, optimizer, schedule. Collective.

    Raises ConfigError, one line, for whatever cannot work together.
    """
    keep_freed_memory()
    mesh = make_mesh(context.world_size, config.replicas)
    groups = mesh.process_groups()
    task = prepare_task(config, groups)
    info = task.info
    if config.batch_size > info.num_train:
        problem = f"{info.name} has only {info.num_train} training samples; use at most that"
        raise ConfigError("batch_size", config.batch_size, problem)
    layers = task.layers()
    try:
        costs = _costs(config, context, groups, task, layers)
        balance, kept = config.balance, None
        if config.remat == "auto":
            balance, kept = cut_and_keep(config, context, groups, task, layers, costs)
        pipe = Pipeline(
            layers,
            config.partitions,
            config.micro_batches,
            loss_fn=task.loss_fn(),
            balance=balance,
            costs=costs,
            schedule=config.schedule,
            remat=config.remat,
            kept=kept.kept if kept is not None else None,
            taper=config.taper,
            seed=config.seed,
            device=context.device,
            autocast=torch.bfloat16 if config.precision == "bf16" else None,
            ties=task.ties(),
            groups=groups,
            replica=mesh.replica_of(context.rank),
        )
    except ValueError as error:
        raise as_config_error(config, error) from error
    if config.channels_last:
        pipe.module.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(pipe.named_parameters(), config.optimizer)
    steps_per_epoch = info.num_train // config.batch_size
    return Session(
        config=config,
        context=context,
        groups=groups,
        task=task,
        pipe=pipe,
        kept=kept,
        optimizer=optimizer,
        lr_schedule=LrSchedule(config.lr_schedule, config.optimizer.lr, steps_per_epoch, config.epochs),
        average=WeightAverage(pipe.module, config.ema_decay) if config.ema_decay else None,
        progress_listeners=tuple(m for m in pipe.module.modules() if hasattr(m, "set_progress")),
    )


def _costs(
    config: TrainConfig, context: RankContext, groups: ProcessGroups | None, task: Task, layers: Layers
) -> Sequence[float] | None:
    """Costs of the layers for the automatic cut; None where there is nothing to cut.

    Running the layers also shows a batch norm that gets a single value, so single samples are always tried.
    """
    automatic = config.balance is None and config.partitions > 1
    samples = config.batch_size // config.micro_batches
    if min(split_sizes(config.batch_size, config.micro_batches, config.taper)) == 1:
        samples = 1
    if not automatic and samples > 1:
        return None
    from gpipe_cli.pipeline.profile import count_costs, measure_layers

    try:
        if config.cut == "time" and automatic:
            sample = task.sample(samples, meta=False)
            # One rank measures: the cut must be the same everywhere, and a clock never says the same twice.
            return from_first(groups, lambda: measure_layers(layers, sample, torch.device(context.device)))
        costs = [cost.work for cost in count_costs(layers, task.sample(samples, meta=True))]
        return costs if automatic else None
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, ValueError) and batch_norm_lacks_values(error):
            raise ConfigError("micro_batches", config.micro_batches, too_small_for_batch_norm(config)) from error
        if not automatic:
            return None
        if config.model.name != "module" or config.cut == "time":
            raise
        problem = f"counting the layers' operations failed ({str(error).splitlines()[0]}); use cut=time or balance=[…]"
        raise ConfigError("cut", config.cut, problem) from error


def as_config_error(config: TrainConfig, error: ValueError) -> ConfigError:
    """The engine's complaint under the name that the setting has on the command line."""
    text = str(error)
    key, _, problem = text.partition(": ")
    if key.startswith("balance="):
        return ConfigError("balance", config.balance, problem)
    if key.startswith("num_partitions="):
        return ConfigError("partitions", config.partitions, problem)
    if key.startswith("schedule="):
        return ConfigError("schedule", config.schedule, problem)
    return ConfigError("model", config.model.factory or config.model.name, text)
