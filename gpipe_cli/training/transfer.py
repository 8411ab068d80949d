"""Beginning with a trained network: a new head, everything below it as it was (paper, section 4).

The head is the last layer with parameters and, where the network has one, AmoebaNet's auxiliary head. What of it
depends on the classes begins anew, from the run's seed: its tensors of another shape, and those with a row for every
class even where the number of classes is the same, since they are other classes. All other tensors are the
checkpoint's, bit for bit, whatever the cut, because a rank reads those of its own layers by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpipe_cli.config import stem_for
from gpipe_cli.errors import ConfigError, as_typed
from gpipe_cli.training.communication import from_all
from gpipe_cli.training.ema import PREFIX as AVERAGE
from gpipe_cli.training.freezing import Frozen
from gpipe_cli.training.optimizer import build_optimizer, layer_scales

if TYPE_CHECKING:
    from gpipe_cli.config_transfer import TransferConfig
    from gpipe_cli.training.session import Session
    from gpipe_cli.training.weights import Shape, StoredWeights

AUXILIARY_HEAD = "aux_head"  # as models/amoebanet names it
# Settings that decide which tensors a network has, the first difference being the likeliest cause of another.
_STRUCTURE = ("name", "factory", "kwargs", "variant", "layers", "filters", "stem", "split_cells")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of every tensor of a network: names; `replaced` with the stored shape, None where there is none."""

    loaded: tuple[str, ...]
    replaced: Mapping[str, Shape | None]
    unused: tuple[str, ...]  # stored, in a head that this network does not have
    misfits: tuple[str, ...]  # of the body: they fit no tensor of the other


def find_heads(parameters: Sequence[str]) -> tuple[str, ...]:
    """The layers that give class scores, from the names of all parameters of the network in layer order."""
    layers = list(dict.fromkeys(name.partition(".")[0] for name in parameters))
    return tuple(layer for layer in layers if layer == layers[-1] or layer == AUXILIARY_HEAD)


def make_plan(shapes: Mapping[str, Shape], stored: Mapping[str, Shape], heads: Sequence[str], num_classes: int) -> Plan:
    """Match the network's tensors with stored ones by name and shape."""
    loaded: list[str] = []
    misfits: list[str] = []
    unused: list[str] = []
    replaced: dict[str, Shape | None] = {}
    for name, shape in shapes.items():
        if name.partition(".")[0] in heads and (stored.get(name) != shape or shape[:1] == (num_classes,)):
            replaced[name] = stored.get(name)
        else:
            (loaded if stored.get(name) == shape else misfits).append(name)
    for name in stored.keys() - shapes.keys():
        (unused if name.partition(".")[0] in (*heads, AUXILIARY_HEAD) else misfits).append(name)
    return Plan(loaded=tuple(loaded), replaced=replaced, unused=tuple(unused), misfits=tuple(sorted(misfits)))


def structure(model: Mapping[str, Any], image_size: int | None) -> dict[str, Any]:
    """The settings of `model` that decide which tensors the network has: those of the networks of its kind."""
    own = ("name", "factory", "kwargs") if model["name"] == "module" else ("name", *_STRUCTURE[3:])
    values: dict[str, Any] = {key: model.get(key) for key in own}
    if "stem" in values and image_size is not None:
        values["stem"] = stem_for(values["stem"], image_size)
    return values


def prepare(session: Session) -> Session:
    """The session with a frozen body and layer-wise rates, as far as they are asked for. Collective.

    Raises ConfigError when there is no body to treat so.
    """
    config: TransferConfig = session.config  # type: ignore[assignment]
    layers, heads = _layers_and_heads(session)
    treated = config.freeze or config.head_warmup_epochs or config.layer_decay != 1
    if treated and set(layers) == set(heads):
        key = "freeze" if config.freeze else "layer_decay" if config.layer_decay != 1 else "head_warmup_epochs"
        problem = f"the network has all its parameters in {heads[-1]}, its head; make the body layers of its own"
        raise ConfigError(key, getattr(config, key), problem)
    body = [module for name, module in session.pipe.module.named_children() if name not in heads]
    listeners = list(session.progress_listeners)
    if config.freeze:
        listeners.append(Frozen(body))
    optimizer = session.optimizer
    if config.freeze or config.layer_decay != 1:
        scales = layer_scales(layers, config.layer_decay, heads)
        optimizer = build_optimizer(session.pipe.named_parameters(), config.optimizer, scales)
    if config.head_warmup_epochs:
        # After the optimizer has been built: it will update the body later, and keeps no state for it until then.
        num_steps = round(config.head_warmup_epochs * session.steps_per_epoch)
        listeners.append(Frozen(body, num_steps, session.lr_schedule.num_steps))
    return dataclasses.replace(session, optimizer=optimizer, progress_listeners=tuple(listeners))


def load_body(session: Session, stored: StoredWeights) -> str:
    """Put the stored weights in the place of the session's, but for the head. Collective; returns what to tell.

    A moving average takes the place of the weights where the stored network has one, and the session's own begins
    with what was loaded. Raises ConfigError for a body of another network, CheckpointError for a file that is damaged.
    """
    pipe = session.pipe
    own = pipe.state_dict()
    everywhere = from_all(session.groups, {name: tuple(tensor.shape) for name, tensor in own.items()})
    shapes = {name: shape for part in everywhere for name, shape in part.items()}
    _, heads = _layers_and_heads(session)
    plan = make_plan(shapes, stored.shapes, heads, session.info.num_classes)
    if plan.misfits:
        raise _another_network(session, stored, plan.misfits[0], shapes)
    tensors = stored.read([name for name in plan.loaded if name in own], average=stored.has_average)
    pipe.load_state_dict({**own, **tensors})
    if session.average is not None:
        session.average.load_state_dict({AVERAGE + name: tensor for name, tensor in pipe.state_dict().items()})
    return _told(session, stored, plan, shapes)


def _layers_and_heads(session: Session) -> tuple[list[str], tuple[str, ...]]:
    """All layers that have parameters, in order, on whichever rank, and which of them are heads. Collective."""
    names = [
        name for part in from_all(session.groups, [n for n, _ in session.pipe.named_parameters()]) for name in part
    ]
    place = {layer: index for index, layer in enumerate(session.pipe.layer_names)}
    layers = sorted({name.partition(".")[0] for name in names}, key=place.__getitem__)
    if not layers:
        raise ConfigError("model", session.config.model.name, "has no parameters: there is nothing to train")
    return layers, find_heads(layers)


def _another_network(session: Session, stored: StoredWeights, misfit: str, shapes: Mapping[str, Shape]) -> ConfigError:
    config = session.config
    ours = structure(dataclasses.asdict(config.model), config.image_size)
    theirs = structure(stored.config["model"], stored.config.get("image_size"))
    for key, value in ours.items():
        if key not in theirs or theirs[key] != value:
            was = as_typed(theirs.get(key))
            setting = "model" if key == "name" else f"model.{key}"
            problem = f"the network of {stored.path} has {setting}={was}, so its body does not fit"
            return ConfigError(setting, value, f"{problem}; use that, or another checkpoint")
    here, there = (
        f"has {misfit} {_shape(known[misfit])}" if misfit in known else f"has no {misfit}"
        for known in (shapes, stored.shapes)
    )
    return ConfigError("checkpoint", str(stored.path), f"is of another network: it {there}, this network {here}")


def _told(session: Session, stored: StoredWeights, plan: Plan, shapes: Mapping[str, Shape]) -> str:
    kind = "averaged weights" if stored.has_average else "weights"
    parts = [f"{kind} of {stored.path}: {len(plan.loaded)} tensors as they are"]
    replaced = [f"{n} {_shape(was)} -> {_shape(shapes[n])}" for n, was in plan.replaced.items() if was is not None]
    added = dict.fromkeys(name.partition(".")[0] for name, was in plan.replaced.items() if was is None)
    if replaced:
        parts.append(f"new for {session.info.num_classes} classes: {', '.join(replaced)}")
    if added:
        parts.append(f"not in it and new: {', '.join(added)}")
    if plan.unused:
        parts.append(f"left out: {', '.join(dict.fromkeys(name.partition('.')[0] for name in plan.unused))}")
    return "; ".join(parts)


def _shape(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
