"""What a stage holds: from counted layers to bytes, all the time and for a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .counting import LayerCount, NetworkCount
from .partition import layer_ranges
from .recording import NOTHING


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One partition's layers and the bytes that it holds.

    ``resident_bytes``: the mini-batch's input, on the first stage. ``working_bytes``: the tensors of its largest
    operation, which exist while that runs. ``output_bytes``: what a micro-batch hands to the next stage. For
    ``input_bytes``, ``activation_bytes``, ``saved_bytes``, ``shared_bytes`` and ``waiting_bytes`` of a micro-batch see
    StageCost.
    """

    layers: range
    num_parameters: int
    num_parameter_tensors: int
    resident_bytes: int
    working_bytes: int
    output_bytes: int
    input_bytes: int
    activation_bytes: int
    saved_bytes: int
    shared_bytes: int
    waiting_bytes: int


def footprints(
    network: NetworkCount, balance: Sequence[int], num_samples: int, batch_size: int
) -> tuple[Footprint, ...]:
    """The stages of a cut for micro-batches of ``num_samples``; the loss belongs to the last."""
    found = []
    inputs = _Tensors([network.input_bytes.at(num_samples)])
    saved_outputs: frozenset[int] = frozenset()
    for number, indices in enumerate(layer_ranges(balance)):
        is_last = number == len(balance) - 1
        counts = [network.layers[index] for index in indices] + ([network.loss] if is_last else [])
        walk = _walk(counts, inputs, num_samples)
        found.append(
            Footprint(
                layers=indices,
                num_parameters=sum(count.num_parameters for count in counts),
                num_parameter_tensors=sum(count.num_parameter_tensors for count in counts),
                resident_bytes=int(network.input_bytes.at(batch_size)) if number == 0 else 0,
                working_bytes=_working_bytes(counts, num_samples),
                output_bytes=0 if is_last else int(sum(walk.outputs.num_bytes)),
                # The first stage's inputs are views of the mini-batch, counted there once.
                input_bytes=0 if number == 0 else int(sum(inputs.num_bytes)),
                activation_bytes=int(walk.held_bytes),
                saved_bytes=int(walk.saved_bytes + (sum(walk.saved_inputs.values()) if number else 0)),
                shared_bytes=int(sum(walk.saved_inputs[index] for index in walk.saved_inputs.keys() & saved_outputs)),
                waiting_bytes=int(sum(count.waiting.at(num_samples) for count in counts)),
            )
        )
        saved_outputs = walk.saved_outputs
        inputs = walk.outputs.as_inputs()
    return tuple(found)


def footprints_by_micro_batch(
    network: NetworkCount, balance: Sequence[int], sizes: Sequence[int], batch_size: int
) -> tuple[tuple[Footprint, ...], ...]:
    """For each micro-batch, of so many samples as ``sizes`` says, the stages of a cut."""
    by_size = {size: footprints(network, balance, size, batch_size) for size in set(sizes)}
    return tuple(by_size[size] for size in sizes)


def rank_bytes(stages: Iterable[Footprint], bytes_per_parameter: float, activation_bytes: int) -> int:
    """Memory of a rank that hosts ``stages``: what they hold all the time, the activations' peak, and room for the
    largest operation."""
    own = list(stages)
    constant = sum(stage.num_parameters * bytes_per_parameter + stage.resident_bytes for stage in own)
    return int(constant + activation_bytes + max(stage.working_bytes for stage in own))


@dataclass
class _Tensors:
    """Tensors between two layers; equal tokens are the same tensor, tokens below zero are the stage's inputs."""

    num_bytes: list[float]
    tokens: list[int] | None = None

    def __post_init__(self) -> None:
        if self.tokens is None:
            self.tokens = [-1 - index for index in range(len(self.num_bytes))]

    def as_inputs(self) -> _Tensors:
        return _Tensors(self.num_bytes)


@dataclass
class _Walk:
    """`saved_inputs`: bytes of those inputs that autograd keeps, by their index; `saved_outputs`: indices."""

    held_bytes: float
    saved_bytes: float
    saved_inputs: dict[int, float]
    saved_outputs: frozenset[int]
    outputs: _Tensors


def _walk(counts: Sequence[LayerCount], inputs: _Tensors, num_samples: int) -> _Walk:
    """What a stage keeps for one micro-batch: a tensor that several layers keep, or pass on, counts once."""
    inside = NOTHING
    known = dict(zip(inputs.tokens or [], inputs.num_bytes, strict=True))
    saved: set[int] = set()
    values = inputs
    for count in counts:
        inside += count.saved_inside
        tokens = values.tokens or []
        saved |= {token for token, is_saved in zip(tokens, count.saved_inputs, strict=True) if is_saved}
        outputs = []
        for output in count.outputs:
            token = len(known) if output.alias is None else tokens[output.alias]
            known.setdefault(token, output.num_bytes.at(num_samples))
            outputs.append(token)
            if output.saved:
                saved.add(token)
        values = _Tensors([output.num_bytes.at(num_samples) for output in count.outputs], outputs)
    made_saved = inside.at(num_samples) + sum(known[token] for token in saved if token >= 0)
    # The stage holds its outputs until their gradients come, whether autograd keeps them or not.
    only_held = sum(known[token] for token in set(values.tokens or []) if token >= 0 and token not in saved)
    return _Walk(
        made_saved + only_held,
        made_saved,
        {-1 - token: known[token] for token in saved if token < 0},
        frozenset(index for index, token in enumerate(values.tokens or []) if token in saved),
        values,
    )


def _working_bytes(counts: Sequence[LayerCount], num_samples: int) -> int:
    unique = {id(count): count for count in counts}.values()
    return int(
        max(
            (work.moved_bytes.at(num_samples) for count in unique for work in (*count.forward, *count.backward)),
            default=0,
        )
    )
