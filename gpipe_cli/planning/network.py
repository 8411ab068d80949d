"""The network and the input that a plan is for, as counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.planning.counting import NetworkCount, count_network
from gpipe_cli.planning.planner import Planner
from gpipe_cli.training.networks import build_network

if TYPE_CHECKING:
    from gpipe_cli.config_plan import PlanConfig


def make_planner(config: PlanConfig) -> Planner:
    """The planner of a configuration. Raises ConfigError for a network that cannot be built or counted."""
    layers = build_network(config.model, config.num_classes, config.image_size, seed=0)
    return Planner(config, _counted(config, layers), layers)


def sample_of(config: PlanConfig, num_samples: int, device: torch.device) -> Tensor:
    """Inputs of `num_samples` samples: token ids for a language model, else pictures (channels-last)."""
    length = getattr(config.model, "seq_len", None)
    if length is not None and str(config.model.name) == "transformer":
        return torch.zeros(num_samples, length, dtype=torch.int64, device=device)
    pictures = torch.empty(num_samples, 3, config.image_size, config.image_size, device=device)
    if device.type != "meta":
        pictures.normal_(generator=torch.Generator(device).manual_seed(0))
    return pictures.contiguous(memory_format=torch.channels_last)


def _counted(config: PlanConfig, layers: object) -> NetworkCount:
    try:
        return count_network(
            layers,  # type: ignore[arg-type]
            sample_of(config, 1, torch.device("meta")),
            activation_width=0.5 if config.precision == "bf16" else 1.0,
            fused_attention=config.hardware.name != "cpu",
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if config.model.name != "module":
            raise
        problem = f"the layers cannot run on tensors without data ({str(error).splitlines()[0]})"
        raise ConfigError("model.factory", config.model.factory, problem) from error
