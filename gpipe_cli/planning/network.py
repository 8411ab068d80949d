"""The network and the input that a plan is for, as counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline import Layers
from gpipe_cli.pipeline.counting import Loss, NetworkCount, count_network
from gpipe_cli.planning.planner import Planner
from gpipe_cli.training.language_loss import CountedLanguageLoss, build_language_loss
from gpipe_cli.training.losses import build_loss
from gpipe_cli.training.made_up import made_up_inputs, made_up_targets
from gpipe_cli.training.networks import build_network

if TYPE_CHECKING:
    from gpipe_cli.config_plan import PlanConfig


# What pictures a network sees where nothing is said: ImageNet's classes at the size of the paper's Table 1.
DEFAULT_IMAGE_SIZE, DEFAULT_NUM_CLASSES = 224, 1000


def make_planner(config: PlanConfig) -> Planner:
    """The planner of a configuration. Raises ConfigError for a network that cannot be built or counted."""
    layers = layers_of(config)
    return Planner(config, _counted(config, layers), layers)


def layers_of(config: PlanConfig) -> Layers:
    """The network's layers. Raises ConfigError for one that cannot be built."""
    return build_network(config.model, _num_classes(config), _image_size(config), seed=0)


def loss_of(config: PlanConfig) -> Callable[[Any, Any], Tensor]:
    """The mean loss that it is trained with."""
    return build_loss(0.0, config.model.aux_weight) if config.model.seq_len is None else build_language_loss()


def sample_of(config: PlanConfig, num_samples: int, device: torch.device) -> Tensor:
    """Inputs of `num_samples` samples: token ids for a network that reads text, else pictures (channels-last)."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    inputs = made_up_inputs(
        num_samples,
        image_size=_image_size(config),
        seq_len=config.model.seq_len,
        num_tokens=_num_classes(config),
        generator=generator,
    )
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs


def mini_batch_of(config: PlanConfig, num_samples: int) -> tuple[Tensor, Tensor]:
    """Inputs on the CPU as of `sample_of`, and int64 targets: of each picture, or of each token."""
    inputs = sample_of(config, num_samples, torch.device("cpu"))
    return inputs, made_up_targets(inputs, _num_classes(config), torch.Generator().manual_seed(0))


def _num_classes(config: PlanConfig) -> int:
    """Those of the last layer; of a network that reads text also the tokens that it knows."""
    if config.model.name == "transformer":
        return config.model.vocab_size
    return config.num_classes or DEFAULT_NUM_CLASSES


def _image_size(config: PlanConfig) -> int | None:
    return None if config.model.seq_len is not None else config.image_size or DEFAULT_IMAGE_SIZE


def _counted(config: PlanConfig, layers: object) -> NetworkCount:
    try:
        return count_network(
            layers,  # type: ignore[arg-type]
            sample_of(config, 1, torch.device("meta")),
            activation_width=0.5 if config.precision == "bf16" else 1.0,
            fused_attention=config.hardware.name != "cpu",
            loss=Loss if config.model.seq_len is None else CountedLanguageLoss,
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if config.model.name != "module":
            raise
        problem = f"the layers cannot run on tensors without data ({str(error).splitlines()[0]})"
        raise ConfigError("model.factory", config.model.factory, problem) from error
