"""Optimizers: timm's, by name, over this rank's parameters.

The paper trains with RMSProp in TensorFlow's form (tensorflow/tpu, amoeba_net_model.py: decay 0.9, momentum 0.9,
epsilon 1.0 inside the root, accumulator starting at one), which is timm's `rmsproptf`. Weight decay leaves
one-dimensional parameters and biases alone, as the reference regularises convolution and linear kernels only.

A layer can have a share of the rate (`layer_scales`, layer-wise decay as in BEiT). timm's `param_groups_layer_decay`
counts the layers of the module it is given, which here is one rank's part, so the scales are computed from the names of
all layers; the groups carry them under timm's key, `lr_scale`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gpipe_cli.errors import ConfigError

if TYPE_CHECKING:
    from gpipe_cli.config import OptimizerConfig

# Settings that have a key of their own, so that one value has one place.
_OWN_KEYS = ("lr", "weight_decay", "momentum")
_SCALE = "lr_scale"  # timm's name of a group's share of the learning rate


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    config: OptimizerConfig,
    scales: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer for this rank's trainable parameters, in groups with and without weight decay.

    An empty list (a stage of pooling layers, or a frozen one) gives an optimizer whose steps do nothing.
    `scales`: shares of the learning rate by layer, the first part of a parameter's name; without an entry it is 1.
    The learning rate of every group is its share of `config.lr` until `set_learning_rate` changes it.

    Raises ConfigError for an unknown optimizer, an unknown option, or a value that the optimizer refuses.
    """
    from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]

    options = _checked_options(config)
    members: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            one_dimensional = parameter.ndim <= 1 or name.endswith(".bias")
            scale = (scales or {}).get(name.partition(".")[0], 1.0)
            members.setdefault((scale, 0.0 if one_dimensional else config.weight_decay), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": weight_decay, "lr": config.lr * scale, _SCALE: scale}
        for (scale, weight_decay), parameters in members.items()
    ]
    if not groups:
        return torch.optim.SGD([{"params": []}], lr=config.lr)
    try:
        return create_optimizer_v2(
            groups,
            opt=config.name,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            **options,
        )
    except (TypeError, ValueError, AssertionError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("optimizer", config.name, f"{reason}; see optimizer.* and optimizer.options") from error


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group its share of the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(_SCALE, 1.0)


def layer_scales(layer_names: Sequence[str], decay: float, heads: Collection[str] = ()) -> dict[str, float]:
    """Share of the learning rate for every layer: `decay ** d` for the d-th layer below the head.

    `layer_names`: all layers of the network that have parameters, in order, whichever rank hosts them. Those in `heads`
    have the whole rate and are not counted. NAME followed by NAME_end, the halves of a cell that models/amoebanet has
    split, count as one, so that the rates are those of the network with whole cells.
    """
    body = [name for name in layer_names if name not in heads]
    scales: dict[str, float] = dict.fromkeys(heads, 1.0)
    depth = 0
    for index in reversed(range(len(body))):
        depth += not (index + 1 < len(body) and body[index + 1] == f"{body[index]}_end")
        scales[body[index]] = decay**depth
    return scales


def _checked_options(config: OptimizerConfig) -> dict[str, Any]:
    """The extra keyword arguments; ConfigError where timm would drop one silently or fail with a traceback."""
    from timm.optim import get_optimizer_class, get_optimizer_info, list_optimizers  # type: ignore[attr-defined]

    name = config.name.lower()
    known = [str(known) for known in list_optimizers(exclude_filters=["fused*", "bnb*"])]
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=4, cutoff=0.5) or ["rmsproptf", "sgd", "adamw", "lamb"]
        raise ConfigError("optimizer.name", config.name, f"unknown; did you mean {', '.join(nearest)}?")
    info = get_optimizer_info(name)
    if info.second_order:
        raise ConfigError(
            "optimizer.name", config.name, "needs second-order gradients, which a pipeline does not compute"
        )
    if name.startswith("kron"):
        raise ConfigError(
            "optimizer.name", config.name, "keeps state that a checkpoint cannot hold; use another one, such as muon"
        )

    optimizer_class: Any = get_optimizer_class(name, bind_defaults=False)
    accepted = [
        key for key in inspect.signature(optimizer_class).parameters if key not in ("self", "params", *_OWN_KEYS)
    ]
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in config.options.items()}
    for key, value in options.items():
        if key == "max_grad_norm":
            raise ConfigError(f"optimizer.options.{key}", value, "set clip_grad_norm, which clips over all partitions")
        if key in _OWN_KEYS:
            raise ConfigError(f"optimizer.options.{key}", value, f"set it as optimizer.{key}")
        if key not in accepted:
            raise ConfigError(
                f"optimizer.options.{key}",
                value,
                f"{config.name} has no such option; it has {', '.join(sorted(accepted))}",
            )
    # LAMB would clip by the norm of one rank's gradients; `clip_grad_norm` clips over all stages.
    if "max_grad_norm" in accepted:
        options["max_grad_norm"] = None
    # timm's `sgd` is Nesterov's form, which torch refuses without momentum, where both forms are the same.
    defaults: Mapping[str, Any] = info.defaults or {}
    if config.momentum == 0 and defaults.get("nesterov"):
        options.setdefault("nesterov", False)
    return options
