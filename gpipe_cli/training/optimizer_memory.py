"""How many values an optimizer keeps for each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_cli.config import OptimizerConfig

FLOAT_BYTES = 4  # weights, gradients and optimizer values stay float32 in every precision

# Values besides the weight and the gradient: (without momentum, with). Importing timm to ask would take seconds.
_KNOWN = {
    "sgd": (0, 1),
    "momentum": (0, 1),
    "rmsprop": (1, 2),
    "rmsproptf": (1, 2),
    "adam": (2, 2),
    "adamw": (2, 2),
    "nadam": (2, 2),
    "nadamw": (2, 2),
    "lamb": (2, 2),
    "lion": (1, 1),
}
_PROBE = 64  # rows and columns of a parameter that shows what an unknown optimizer keeps


def num_kept_values(config: OptimizerConfig) -> float:
    """Values that the optimizer keeps for each value of a parameter; a fraction where it keeps factors of them.

    An optimizer that the table does not know makes one step on a small matrix. Raises ConfigError for a wrong setting.
    """
    name = config.name.lower()
    if name in _KNOWN and not config.options.get("amsgrad"):
        return _KNOWN[name][config.momentum > 0]
    import torch

    from gpipe_cli.training.optimizer import build_optimizer

    parameter = torch.nn.Parameter(torch.ones(_PROBE, _PROBE))
    optimizer = build_optimizer([("probe", parameter)], config)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
    return kept // _PROBE / _PROBE  # a step counter is no value of the matrix


def bytes_per_parameter(config: OptimizerConfig) -> float:
    """4 for the weight, 4 for its gradient and 4 for each value that the optimizer keeps.

    The paper's 12 for RMSProp are the weight, the mean square and the momentum, without the gradient.
    """
    return FLOAT_BYTES * (2 + num_kept_values(config))
