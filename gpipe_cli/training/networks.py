"""The network that a configuration names, as named layers: the only module that imports the models.

`model=module` takes a user's function. It is the one thing in the configuration that is imported by name, because the
user names it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from gpipe_cli.config import stem_for
from gpipe_cli.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from gpipe_cli.config import ModelConfig, TrainConfig
    from gpipe_cli.pipeline import Layers


def build_network(config: ModelConfig, num_classes: int, image_size: int | None, seed: int) -> Layers:
    """The layers for `num_classes` classes and square pictures of `image_size` pixels; factories, so nothing is built.

    A language model has its own number of classes, `model.vocab_size`, and no pictures.

    Raises ConfigError, one line, for a model setting that the network refuses.
    """
    arguments = network_arguments(config, num_classes, image_size)
    if config.name == "module":
        return _users_network(config, arguments, seed)
    if config.aux_head and config.aux_weight == 0:
        raise ConfigError("model.aux_head", True, "has no effect with model.aux_weight=0; leave out one of them")
    try:
        layers: Layers = _built_in(config.name)(**arguments)
    except ValueError as error:
        raise ConfigError("model", config.name, str(error)) from error
    return layers


def _built_in(name: str) -> Callable[..., Any]:
    if name == "transformer":
        from gpipe_cli.models.transformer.network import transformer

        return cast(Callable[..., Any], transformer)
    from gpipe_cli.models.amoebanet.network import amoebanet

    return cast(Callable[..., Any], amoebanet)


def sample_convolutions() -> nn.Sequential:
    """A few convolutions of 64 channels as AmoebaNet has them: pieces of a network to measure a device with."""
    from torch import nn

    from gpipe_cli.models.amoebanet.operations import Conv

    return nn.Sequential(Conv(64, 64, (1, 7)), Conv(64, 256), Conv(256, 64))


def network_arguments(config: ModelConfig, num_classes: int, image_size: int | None) -> dict[str, Any]:
    """Arguments of the function that gives the network's layers, `amoebanet`, `transformer` or the user's own.

    The user's function gets `model.kwargs`, and `num_classes`, `image_size` (of pictures) and `seq_len` (of text) if it
    has parameters of these names. Raises ConfigError when it cannot be found or called so.
    """
    if config.name == "module":
        offered = {"num_classes": num_classes, "image_size": image_size, "seq_len": config.seq_len}
        given = {name: value for name, value in offered.items() if value is not None}
        return _arguments(_find(str(config.factory)), config, given)
    if config.name == "transformer":
        return {
            "num_layers": config.layers,
            "width": config.width,
            "num_heads": config.num_heads,
            "ff_width": config.ff_width,
            "vocab_size": config.vocab_size,
            "seq_len": config.seq_len,
            "dropout": config.dropout,
        }
    assert image_size is not None
    return {
        "variant": config.variant,
        "num_layers": config.layers,
        "num_filters": config.filters,
        "num_classes": num_classes,
        "stem": stem_for(config.stem, image_size),
        "dropout": config.dropout,
        "drop_path": config.drop_path,
        "drop_path_by_depth": config.drop_path_by_depth,
        "aux_head": config.aux_head,
        "bn_momentum": config.bn_momentum,
        "bn_eps": config.bn_eps,
        "image_size": image_size,
        "split_cells": config.split_cells,
    }


def tied_parameters(config: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Full names of the parameters of a network that are one and the same: the engine's `ties`."""
    if config.name != "transformer" or not config.tied:
        return ()
    from gpipe_cli.models.transformer.network import TIED_SOFTMAX

    ties: tuple[tuple[str, ...], ...] = TIED_SOFTMAX
    return ties


def _users_network(config: ModelConfig, arguments: Mapping[str, Any], seed: int) -> Layers:
    """What `model.factory` returns: an nn.Sequential, or pairs of a name and a factory (or module).

    It runs under the run's seed, so that every rank gets the same modules.
    """
    import torch

    from gpipe_cli.pipeline.layers import named_layers

    factory = _find(str(config.factory))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = factory(**arguments)
    if not isinstance(layers, (torch.nn.Sequential, list, tuple)):
        problem = f"returned {type(layers).__name__}; return an nn.Sequential or a list of (name, factory)"
        raise ConfigError("model.factory", config.factory, problem)
    if not isinstance(layers, torch.nn.Sequential) and all(isinstance(layer, torch.nn.Module) for layer in layers):
        layers = torch.nn.Sequential(*layers)
    try:
        named_layers(layers)
    except (TypeError, ValueError) as error:
        raise ConfigError("model.factory", config.factory, str(error)) from error
    result: Layers = layers
    return result


def batch_norm_lacks_values(error: ValueError) -> bool:
    """Whether an error is torch's complaint about a channel with a single value, which has no variance."""
    return str(error).startswith("Expected more than 1 value per channel")


def too_small_for_batch_norm(config: TrainConfig) -> str:
    """What to do about a batch norm that sees one value per channel."""
    from gpipe_cli.pipeline.sizes import split_sizes

    samples = min(split_sizes(config.batch_size, config.micro_batches, config.taper))
    taper = ", taper=true" if config.taper else ""
    return (
        f"a micro-batch of {samples} sample{'s' * (samples > 1)} (batch_size={config.batch_size}, "
        f"micro_batches={config.micro_batches}{taper}) gives a batch norm a single value per channel: use fewer "
        "micro_batches, a larger batch_size or a larger image_size"
    )


def _find(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    # The user's module usually lies where the command is typed, which a console script does not search.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing == module_name or module_name.startswith(f"{missing}."):
            problem = f"there is no module {missing} here or installed; run gpipe where it lies, or install it"
        else:
            problem = f"importing {module_name} needs the module {missing}, which is not installed"
        raise ConfigError("model.factory", path, problem) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        problem = f"{module_name} has no function {name}; it has {', '.join(names) or 'none'}"
        raise ConfigError("model.factory", path, problem)
    found: Callable[..., Any] = factory
    return found


def _arguments(factory: Callable[..., Any], config: ModelConfig, offered: Mapping[str, int]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    arguments = {name: value for name, value in offered.items() if name in parameters} | dict(config.kwargs)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        problem = f"{config.factory} does not take these arguments: {error}; it has {', '.join(parameters) or 'none'}"
        raise ConfigError("model.kwargs", dict(config.kwargs), problem) from error
    return arguments
