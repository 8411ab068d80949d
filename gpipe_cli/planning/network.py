"""The network and the input that a plan is for, as counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.counting import Loss, NetworkCount, count_network
from gpipe_cli.planning.planner import Planner
from gpipe_cli.training.language_loss import CountedLanguageLoss
from gpipe_cli.training.networks import build_network

if TYPE_CHECKING:
    from gpipe_cli.config_plan import PlanConfig


# What pictures a network sees where nothing is said: ImageNet's classes at the size of the paper's Table 1.
DEFAULT_IMAGE_SIZE, DEFAULT_NUM_CLASSES = 224, 1000


def make_planner(config: PlanConfig) -> Planner:
    """The planner of a configuration. Raises ConfigError for a network that cannot be built or counted."""
    layers = build_network(config.model, config.num_classes or DEFAULT_NUM_CLASSES, _image_size(config), seed=0)
    return Planner(config, _counted(config, layers), layers)


def sample_of(config: PlanConfig, num_samples: int, device: torch.device) -> Tensor:
    """Inputs of `num_samples` samples: token ids for a network that reads text, else pictures (channels-last)."""
    size = _image_size(config)
    if size is None:
        assert config.model.seq_len is not None
        return torch.zeros(num_samples, config.model.seq_len, dtype=torch.int64, device=device)
    pictures = torch.empty(num_samples, 3, size, size, device=device)
    if device.type != "meta":
        pictures.normal_(generator=torch.Generator(device).manual_seed(0))
    return pictures.contiguous(memory_format=torch.channels_last)


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
