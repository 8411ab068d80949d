"""The network as a sequence of named layers, and parameters that several layers share.

A layer is a module, or a factory that builds one. A rank builds only the layers it hosts, each under a seed of its
own, so the initial weights do not depend on the cut and a model that fits on no single machine can start.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .randomness import INITIALISATION, derive_seed, preserved_generators, seed_generators

LayerFactory: TypeAlias = Callable[[], nn.Module]
Layers: TypeAlias = nn.Sequential | Sequence[tuple[str, LayerFactory | nn.Module]]


@dataclass(frozen=True)
class NamedLayer:
    """One unit of the sequence: a name and either a module or a factory that builds it."""

    name: str
    source: LayerFactory | nn.Module

    def build(self, index: int, seed: int) -> nn.Module:
        """The module; a factory runs with torch's generator seeded by (seed, index) and its state put back."""
        if isinstance(self.source, nn.Module):
            return self.source
        cpu = torch.device("cpu")
        with preserved_generators(cpu):
            seed_generators(cpu, derive_seed(INITIALISATION, seed, index))
            module = self.source()
        if not isinstance(module, nn.Module):
            raise TypeError(f"the factory of layer {self.name!r} returned {type(module).__name__}, not an nn.Module")
        return module

    def build_without_data(self, index: int) -> nn.Module:
        """The module of a factory on the meta device, shapes without data; a given module as it is."""
        with torch.device("meta"), _NothingDrawn():
            return self.build(index, 0)


class _NothingDrawn(TorchFunctionMode):
    """Initial values of tensors without data are not drawn: torch would load its compiler, in a second, for some."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


# Methods of tensors and functions of torch.nn.init alike.
_DRAWS = ("normal_", "uniform_", "kaiming_uniform_")


@dataclass(frozen=True)
class Tie:
    """Uses of one parameter in different layers, in layer order: (layer index, name within the layer)."""

    uses: tuple[tuple[int, str], ...]


def named_layers(layers: Layers) -> tuple[NamedLayer, ...]:
    """Layers under unique names; raises ValueError or TypeError naming the entry that is wrong."""
    # _modules rather than named_children(): the latter leaves out the second use of a module.
    pairs = list(layers._modules.items()) if isinstance(layers, nn.Sequential) else list(layers)
    if not pairs:
        raise ValueError("the network has no layers")
    seen: set[str] = set()
    result = []
    for index, pair in enumerate(pairs):
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"layer {index} is {type(pair).__name__}: give (name, factory or module)")
        name, source = pair
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"layer {index} is named {name!r}: a name is a non-empty text without dots")
        if name in seen:
            raise ValueError(f"two layers are named {name!r}: names must differ")
        if not callable(source):
            raise TypeError(
                f"layer {name!r} is {type(source).__name__}: give an nn.Module or a factory without arguments"
            )
        seen.add(name)
        result.append(NamedLayer(name, source))
    return tuple(result)


def find_ties(layers: Sequence[NamedLayer], declared: Iterable[Sequence[str]] = ()) -> tuple[Tie, ...]:
    """Parameters used by several layers: found by identity among modules, declared by full name for factories.

    Raises ValueError for a name that fits no layer, and for a shared batch norm, whose running statistics would have
    two owners.
    """
    uses: dict[int, list[tuple[int, str]]] = defaultdict(list)
    buffers: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer.source, nn.Module):
            for name, parameter in layer.source.named_parameters():
                uses[id(parameter)].append((index, name))
            for name, buffer in layer.source.named_buffers():
                other, other_name = buffers.setdefault(id(buffer), (index, name))
                if other != index:
                    raise ValueError(
                        f"layers {layers[other].name!r} and {layer.name!r} share the buffer {other_name}: "
                        "parameters can be shared, running statistics cannot; give each layer a module of its own"
                    )
    ties = [Tie(tuple(places)) for places in uses.values() if len(places) > 1]
    positions = {layer.name: index for index, layer in enumerate(layers)}
    for group in declared:
        places = []
        for full_name in group:
            layer_name, _, name = full_name.partition(".")
            if layer_name not in positions or not name:
                raise ValueError(f"ties: {full_name!r} names no layer; layers are {', '.join(positions)}")
            places.append((positions[layer_name], name))
        ties.append(Tie(tuple(sorted(places))))
    return tuple(ties)


class Partition(nn.Module):
    """The layers that one rank hosts, under their names: state_dict keys are those of the plain nn.Sequential."""

    def __init__(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, module in named:
            self.add_module(name, module)


def build_layers(
    layers: Sequence[NamedLayer], indices: Sequence[int], ties: Sequence[Tie], seed: int
) -> dict[int, nn.Module]:
    """Build the layers at ``indices``. A later use of a tied parameter gets a copy, kept equal by summing gradients.

    Separate copies in every case, one process or many, so that gradients are summed in the same order for every cut.
    """
    later_uses = {place[0] for tie in ties for place in tie.uses[1:]}
    built = {}
    for index in indices:
        module = layers[index].build(index, seed)
        if index in later_uses and isinstance(layers[index].source, nn.Module):
            module = copy.deepcopy(module)
        built[index] = module
    return built
