"""From counted layers to stages: what one micro-batch costs a stage in time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpipe_cli.pipeline.counting import NetworkCount
from gpipe_cli.pipeline.footprint import Footprint, footprints
from gpipe_cli.pipeline.simulate import StageCost
from gpipe_cli.planning.hardware import Hardware
from gpipe_cli.training.optimizer_memory import FLOAT_BYTES

# (layer index, samples in a micro-batch) -> seconds forward, seconds backward.
LayerSeconds = Callable[[int, int], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One partition: what it holds, and its cost for a micro-batch."""

    footprint: Footprint
    first_name: str
    last_name: str
    parameter_bytes: float
    cost: StageCost

    @property
    def layers(self) -> range:
        return self.footprint.layers

    @property
    def num_parameters(self) -> int:
        return self.footprint.num_parameters


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
    held = footprints(network, balance, num_samples, batch_size)
    for number, footprint in enumerate(held):
        is_last = number == len(held) - 1
        indices = footprint.layers
        times = [seconds(index, num_samples) for index in (*indices, *([len(network.layers)] if is_last else []))]
        stages.append(
            Stage(
                footprint=footprint,
                first_name=network.names[indices[0]],
                last_name=network.names[indices[-1]],
                parameter_bytes=footprint.num_parameters * bytes_per_parameter,
                cost=StageCost(
                    forward_s=sum(forward for forward, _ in times),
                    backward_s=sum(backward for _, backward in times),
                    transfer_s=0.0 if is_last else hardware.transfer_s(footprint.output_bytes),
                    update_s=update_s(footprint.num_parameters, footprint.num_parameter_tensors, kept_values, hardware),
                    input_bytes=footprint.input_bytes,
                    activation_bytes=footprint.activation_bytes,
                    saved_bytes=footprint.saved_bytes,
                    shared_bytes=footprint.shared_bytes,
                    waiting_bytes=footprint.waiting_bytes,
                ),
            )
        )
    return tuple(stages)


def update_s(num_parameters: int, num_tensors: int, kept_values: float, hardware: Hardware) -> float:
    """The optimizer's step: weights and its values read and written, gradients read, some operations a tensor."""
    moved = num_parameters * FLOAT_BYTES * (3 + 2 * kept_values)
    return moved / hardware.stream_bytes_per_s + num_tensors * (2 + 2 * kept_values) * hardware.overhead_s
