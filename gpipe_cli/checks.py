"""Checks over more than one setting: combinations that cannot work, or in which a setting would be ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_cli.errors import ConfigError

if TYPE_CHECKING:
    from gpipe_cli.config import ModelConfig, TrainConfig

AUX_WEIGHT = 0.4  # the reference's, the default in conf/model/amoebanet.yaml
FEWEST_CELLS = 2  # AmoebaNet has a reduction cell before normal cells L/3 and 2L/3
SMALLEST_IMAGE = 8  # what models/amoebanet accepts: its reductions still have a pixel to work on


def check_together(config: TrainConfig) -> None:
    """Raises ConfigError for the first pair of settings in conflict."""
    _check_pipeline(config)
    check_model(config.model, config.image_size)
    _check_data(config)
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
    check_taper(config.taper, config.micro_batches, config.batch_size)
    if config.balance is not None and len(config.balance) != config.partitions:
        raise ConfigError(
            "balance",
            config.balance,
            f"names {len(config.balance)} partitions but partitions={config.partitions}; give one number of layers "
            "for each, or leave balance out",
        )
    if config.memory_gb is not None and config.remat != "auto":
        problem = f"is what remat=auto fills, but remat={config.remat}; add remat=auto, or leave memory_gb out"
        raise ConfigError("memory_gb", config.memory_gb, problem)
    if config.balance is not None and config.cut != "flops":
        raise ConfigError("cut", config.cut, "is the cost for the automatic balance; leave out either cut or balance")
    if config.ranks is not None and config.ranks > config.partitions * config.replicas:
        raise ConfigError(
            "ranks",
            config.ranks,
            f"there is work for partitions={config.partitions} ranks only; use ranks={config.partitions} or less",
        )


def check_taper(taper: bool, micro_batches: int, batch_size: int) -> None:
    """Raises ConfigError where tapered micro-batches would be as even as others."""
    if taper and not 3 <= micro_batches < batch_size:
        problem = (
            f"has no effect on micro_batches={micro_batches} of batch_size={batch_size}; use three or more, of more"
        )
        raise ConfigError("taper", taper, f"{problem} samples, or leave it out")


def check_model(model: ModelConfig, image_size: int | None) -> None:
    """Raises ConfigError for a network that its settings, or the size of its input, rule out."""
    if model.name == "transformer":
        _check_transformer(model)
        return
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
    if model.layers < FEWEST_CELLS:
        raise ConfigError("model.layers", model.layers, f"expected a whole number, {FEWEST_CELLS} or more")
    if image_size is not None and image_size < SMALLEST_IMAGE:
        problem = f"too small for model={model.name}; use image_size={SMALLEST_IMAGE} or more"
        raise ConfigError("image_size", image_size, problem)


def check_made_up_input(model: ModelConfig, image_size: int | None, num_classes: int | None) -> None:
    """Raises ConfigError for a size of pictures, or a number of classes, that a network for text does not have."""
    if model.seq_len is not None and image_size is not None:
        problem = f"model={model.name} reads text of model.seq_len={model.seq_len} tokens, no pictures; leave it out"
        raise ConfigError("image_size", image_size, problem)
    if model.name == "transformer" and num_classes is not None:
        problem = f"model=transformer tells model.vocab_size={model.vocab_size} tokens apart; leave it out"
        raise ConfigError("num_classes", num_classes, problem)


def _check_transformer(model: ModelConfig) -> None:
    if model.width % 2:
        problem = "expected an even number: half of a position are sines, half cosines"
        raise ConfigError("model.width", model.width, problem)
    if model.width % model.num_heads:
        problem = f"the heads share model.width={model.width} evenly; use a divisor of it"
        raise ConfigError("model.num_heads", model.num_heads, problem)
    if model.seq_len is None:
        raise ConfigError("model.seq_len", None, "expected a whole number, 1 or more")


def _check_data(config: TrainConfig) -> None:
    """The network and the data must be of one kind: pictures or text."""
    model, dataset = config.model, config.dataset
    text = dataset.name == "text"
    if model.name == "transformer" and not text:
        raise ConfigError("dataset", dataset.name, "model=transformer reads text; use dataset=text or leave it out")
    if model.name == "amoebanet" and text:
        raise ConfigError("dataset", "text", "model=amoebanet sees pictures; use model=transformer for text")
    if text and config.image_size is not None:
        raise ConfigError("image_size", config.image_size, "dataset=text has no pictures; leave it out")
    if not text and config.image_size is None:
        raise ConfigError("image_size", None, f"dataset={dataset.name} has pictures; give a size in pixels")
    if text and model.seq_len is None:
        raise ConfigError("model.seq_len", None, "dataset=text is cut into sequences; give their tokens, such as 128")
    if not text and model.name == "module" and model.seq_len is not None:
        raise ConfigError("model.seq_len", model.seq_len, "is for dataset=text; leave it out")


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
