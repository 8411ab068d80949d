"""Checks over more than one setting: combinations that cannot work, or in which a setting would be ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_cli.errors import ConfigError

if TYPE_CHECKING:
    from gpipe_cli.config import ModelConfig, TrainConfig

AUX_WEIGHT = 0.4  # the reference's, the default in conf/model/amoebanet.yaml
SMALLEST_IMAGE = 8  # what models/amoebanet accepts: its reductions still have a pixel to work on


def check_together(config: TrainConfig) -> None:
    """Raises ConfigError for the first pair of settings in conflict."""
    _check_pipeline(config)
    check_model(config.model, config.image_size)
    _check_training(config)


def _check_pipeline(config: TrainConfig) -> None:
    if config.replicas > 1:
        raise ConfigError(
            "replicas", config.replicas, "replicas of the pipeline come later; use replicas=1 and partitions=N for now"
        )
    if config.micro_batches > config.batch_size:
        raise ConfigError(
            "micro_batches",
            config.micro_batches,
            f"there are only batch_size={config.batch_size} samples to split; use micro_batches={config.batch_size} "
            "or less, or a larger batch_size",
        )
    if config.balance is not None and len(config.balance) != config.partitions:
        raise ConfigError(
            "balance",
            config.balance,
            f"names {len(config.balance)} partitions but partitions={config.partitions}; give one number of layers "
            "for each, or leave balance out",
        )
    if config.balance is not None and config.cut != "flops":
        raise ConfigError("cut", config.cut, "is the cost for the automatic balance; leave out either cut or balance")
    if config.ranks is not None and config.ranks > config.partitions * config.replicas:
        raise ConfigError(
            "ranks",
            config.ranks,
            f"there is work for partitions={config.partitions} ranks only; use ranks={config.partitions} or less",
        )


def check_model(model: ModelConfig, image_size: int) -> None:
    """Raises ConfigError for a network that its settings, or the size of its input, rule out."""
    if model.name == "module":
        if model.factory is None:
            raise ConfigError("model.factory", None, "model=module needs model.factory=package.module:function")
        module, colon, function = model.factory.partition(":")
        if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ConfigError("model.factory", model.factory, "expected package.module:function")
        return
    if model.factory is not None:
        problem = f"model={model.name} has no factory; add model=module to train your own layers"
        raise ConfigError("model.factory", model.factory, problem)
    if model.drop_path_by_depth and model.drop_path == 0:
        raise ConfigError(
            "model.drop_path_by_depth", True, "has no effect without model.drop_path; set model.drop_path=0.2"
        )
    if model.aux_weight != AUX_WEIGHT and not model.aux_head:
        problem = "has no effect without model.aux_head=true; set that, or leave the weight out"
        raise ConfigError("model.aux_weight", model.aux_weight, problem)
    if model.filters % 4:
        raise ConfigError("model.filters", model.filters, "expected a multiple of 4, the stem has a quarter of them")
    if image_size < SMALLEST_IMAGE:
        problem = f"too small for model={model.name}; use image_size={SMALLEST_IMAGE} or more"
        raise ConfigError("image_size", image_size, problem)


def _check_training(config: TrainConfig) -> None:
    warmup = config.lr_schedule.warmup_epochs
    if config.epochs > 0 and warmup > config.epochs:
        raise ConfigError(
            "lr_schedule.warmup_epochs",
            warmup,
            f"the warm-up is longer than epochs={config.epochs}; use lr_schedule.warmup_epochs={config.epochs} or "
            "less, or more epochs",
        )
    if config.lr_schedule.min_lr > config.optimizer.lr:
        raise ConfigError(
            "lr_schedule.min_lr",
            config.lr_schedule.min_lr,
            f"is above optimizer.lr={config.optimizer.lr:g}; use a smaller lr_schedule.min_lr",
        )
