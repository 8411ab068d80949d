"""From counted layers to stages: what one micro-batch costs a stage in time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpipe_cli.pipeline.partition import layer_ranges
from gpipe_cli.pipeline.simulate import StageCost
from gpipe_cli.planning.counting import LayerCount, NetworkCount
from gpipe_cli.planning.hardware import Hardware
from gpipe_cli.planning.optimizers import FLOAT_BYTES
from gpipe_cli.planning.recording import NOTHING

# (layer index, samples in a micro-batch) -> seconds forward, seconds backward.
LayerSeconds = Callable[[int, int], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One partition: its layers, what it holds all the time, and its cost for a micro-batch.

    `resident_bytes`: the mini-batch's input, on the first stage. `working_bytes`: the tensors of its largest operation,
    which exist while that runs.
    """

    layers: range
    first_name: str
    last_name: str
    num_parameters: int
    parameter_bytes: float
    resident_bytes: int
    working_bytes: int
    output_bytes: int
    cost: StageCost


def make_stages(
    network: NetworkCount,
    balance: Sequence[int],
    num_samples: int,
    batch_size: int,
    *,
    hardware: Hardware,
    seconds: LayerSeconds,
    bytes_per_parameter: float,
    kept_values: float,
) -> tuple[Stage, ...]:
    """The stages of a cut for micro-batches of `num_samples`."""
    stages = []
    inputs = _Tensors([network.input_bytes.at(num_samples)])
    for number, indices in enumerate(layer_ranges(balance)):
        is_last = number == len(balance) - 1
        counts = [network.layers[index] for index in indices] + ([network.loss] if is_last else [])
        walk = _walk(counts, inputs, num_samples)
        num_parameters = sum(count.num_parameters for count in counts)
        tensors = sum(count.num_parameter_tensors for count in counts)
        times = [seconds(index, num_samples) for index in (*indices, *([len(network.layers)] if is_last else []))]
        output_bytes = 0 if is_last else int(sum(walk.outputs.num_bytes))
        input_bytes = 0 if number == 0 else int(sum(inputs.num_bytes))
        stages.append(
            Stage(
                layers=indices,
                first_name=network.names[indices[0]],
                last_name=network.names[indices[-1]],
                num_parameters=num_parameters,
                parameter_bytes=num_parameters * bytes_per_parameter,
                resident_bytes=int(network.input_bytes.at(batch_size)) if number == 0 else 0,
                working_bytes=_working_bytes(counts, num_samples),
                output_bytes=output_bytes,
                cost=StageCost(
                    forward_s=sum(forward for forward, _ in times),
                    backward_s=sum(backward for _, backward in times),
                    transfer_s=0.0 if is_last else hardware.transfer_s(output_bytes),
                    update_s=update_s(num_parameters, tensors, kept_values, hardware),
                    input_bytes=input_bytes,
                    activation_bytes=int(walk.held_bytes),
                    # The first stage's inputs are views of the mini-batch, counted there once.
                    saved_bytes=int(walk.saved_bytes + (walk.saved_input_bytes if number else 0)),
                ),
            )
        )
        inputs = walk.outputs.as_inputs()
    return tuple(stages)


def update_s(num_parameters: int, num_tensors: int, kept_values: float, hardware: Hardware) -> float:
    """The optimizer's step: weights and its values read and written, gradients read, some operations a tensor."""
    moved = num_parameters * FLOAT_BYTES * (3 + 2 * kept_values)
    return moved / hardware.stream_bytes_per_s + num_tensors * (2 + 2 * kept_values) * hardware.overhead_s


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
    held_bytes: float
    saved_bytes: float
    saved_input_bytes: float
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
    return _Walk(made_saved + only_held, made_saved, sum(known[token] for token in saved if token < 0), values)


def _working_bytes(counts: Sequence[LayerCount], num_samples: int) -> int:
    unique = {id(count): count for count in counts}.values()
    return int(
        max(
            (work.moved_bytes.at(num_samples) for count in unique for work in (*count.forward, *count.backward)),
            default=0,
        )
    )
