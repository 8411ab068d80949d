"""Plans: what a network, a cut, K and M give on some hardware, in time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.counting import LayerCount, NetworkCount
from gpipe_cli.pipeline.footprint import rank_bytes
from gpipe_cli.pipeline.partition import check_balance, cut
from gpipe_cli.pipeline.policies import REMAT_MODES, cut_weights, make_schedule, remat_for_cut
from gpipe_cli.pipeline.profile import combined_work
from gpipe_cli.pipeline.rematerialization import keep_what_fits
from gpipe_cli.pipeline.schedule import Operation, OperationKind, Schedule
from gpipe_cli.pipeline.simulate import Simulation, StageCost, peak_memory, simulate
from gpipe_cli.pipeline.sizes import split_sizes
from gpipe_cli.planning.hardware import Hardware, described
from gpipe_cli.planning.stages import Stage, make_stages
from gpipe_cli.training.optimizer_memory import bytes_per_parameter, num_kept_values

if TYPE_CHECKING:
    from gpipe_cli.config_plan import PlanConfig
    from gpipe_cli.pipeline import Layers


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What distinguishes one plan from another of the same network.

    `recompute_fresh`: with remat=full, recompute also what the last operation has just computed, as the paper's and
    torchgpipe's code do; our schedules do not.
    """

    partitions: int
    micro_batches: int
    batch_size: int
    remat: str
    cut: str
    balance: tuple[int, ...] | None = None
    ranks: int | None = None
    taper: bool = False
    recompute_fresh: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A predicted training step. Tuples have an entry per stage, those named `_per_rank` one per rank.

    `stages` are those of the largest micro-batch; `sizes` and `costs` have an entry per micro-batch: its samples and
    its stages' costs.
    `is_timed`: the times of its stages are measured, and only their order is simulated.
    """

    choice: Choice
    schedule: Schedule
    hardware: Hardware
    stages: tuple[Stage, ...]
    sizes: tuple[int, ...]
    costs: tuple[tuple[StageCost, ...], ...]
    simulation: Simulation
    memory_bytes_per_rank: tuple[int, ...]
    is_timed: bool = False

    @property
    def balance(self) -> tuple[int, ...]:
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def num_samples(self) -> int:
        """Samples in the largest micro-batch."""
        return max(self.sizes)

    @property
    def samples_per_s(self) -> float:
        return self.choice.batch_size / self.simulation.step_time_s

    @property
    def fits(self) -> bool:
        return max(self.memory_bytes_per_rank) <= self.hardware.memory_bytes

    @property
    def num_parameters(self) -> int:
        return sum(stage.num_parameters for stage in self.stages)

    @property
    def parameter_bytes(self) -> float:
        return sum(stage.parameter_bytes for stage in self.stages)

    @cached_property
    def activation_bytes_by_remat(self) -> tuple[dict[str, int], ...]:
        """Peaks of every stage under each mode of re-materialization."""
        peaks: list[dict[str, int]] = [{} for _ in self.stages]
        for remat in REMAT_MODES:
            if remat == "auto":
                continue
            schedule = _schedule(self.choice, self.schedule.policy, remat, None)
            for number, stage in enumerate(self.stages):
                rank = schedule.operations[schedule.rank_of_stage[number]]
                own = [operation for operation in rank if operation.stage == number]
                peaks[number][remat] = peak_memory(own, self.costs)[0] + stage.footprint.resident_bytes
        return tuple(peaks)

    @property
    def activation_bytes(self) -> int:
        """Peaks of all ranks together, the mini-batch's input included."""
        return sum(self.simulation.peak_activation_bytes) + sum(stage.footprint.resident_bytes for stage in self.stages)


class Planner:
    """Evaluates choices for one network on one kind of hardware.

    `measured_s`: (samples, threads) -> seconds of every layer's two passes together, for cut=time.
    """

    def __init__(self, config: PlanConfig, network: NetworkCount, layers: Layers) -> None:
        self.config = config
        self.network = network
        self._layers = layers
        self._kept_values = num_kept_values(config.optimizer)
        self.bytes_per_parameter = float(config.bytes_per_parameter or bytes_per_parameter(config.optimizer))
        self._hardware: dict[int, Hardware] = {}
        self._seconds: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._measured: dict[tuple[int, int], tuple[float, ...]] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}

    @property
    def num_layers(self) -> int:
        return len(self.network.layers)

    def first_choice(self) -> Choice:
        """The settings as given; with `auto` in one of them, a starting point."""
        config = self.config
        partitions = config.partitions if isinstance(config.partitions, int) else 1
        micro_batches = config.micro_batches if isinstance(config.micro_batches, int) else 1
        return Choice(
            partitions=partitions,
            micro_batches=micro_batches,
            batch_size=config.batch_size,
            remat=config.remat,
            cut=config.cut,
            balance=config.balance,
            ranks=config.ranks,
            taper=config.taper,
        )

    def evaluate(self, choice: Choice) -> Plan:
        """The plan of one choice. Raises ConfigError for one that cannot be."""
        self._check(choice)
        ranks = choice.ranks or choice.partitions
        hardware = self.hardware(ranks)
        usual = math.ceil(choice.batch_size / choice.micro_batches)
        balance = self._balance(choice, usual, ranks)
        # Even ones are all counted as the largest.
        sizes = (usual,) * choice.micro_batches
        if choice.taper:
            sizes = split_sizes(choice.batch_size, choice.micro_batches, tapered=True)
        by_size = {
            size: make_stages(
                self.network,
                balance,
                size,
                choice.batch_size,
                hardware=hardware,
                seconds=lambda layer, samples: self.layer_s(layer, samples, ranks, usual),
                bytes_per_parameter=self.bytes_per_parameter,
                kept_values=self._kept_values,
            )
            for size in set(sizes)
        }
        stages, costs = by_size[max(sizes)], tuple(tuple(stage.cost for stage in by_size[size]) for size in sizes)
        kept = None
        if choice.remat == "auto":
            kept = keep_what_fits(
                [[stage.footprint for stage in by_size[size]] for size in sizes],
                _schedule(choice, self.config.schedule, "full", None),
                self.bytes_per_parameter,
                [hardware.memory_bytes] * ranks,
            ).kept
        schedule = _schedule(choice, self.config.schedule, choice.remat, kept)
        simulation = simulate(schedule, costs)
        return Plan(
            choice=choice,
            schedule=schedule,
            hardware=hardware,
            stages=stages,
            sizes=sizes,
            costs=costs,
            simulation=simulation,
            memory_bytes_per_rank=tuple(
                rank_bytes([stages[number].footprint for number in numbers], self.bytes_per_parameter, peak)
                for numbers, peak in zip(schedule.stages_of_rank, simulation.peak_activation_bytes, strict=True)
            ),
        )

    def hardware(self, ranks: int) -> Hardware:
        """One of `ranks` accelerators; the CPU's cores and memory are shared out."""
        config = self.config
        if config.hardware.name != "cpu":
            return described(config.hardware, config.precision)
        if ranks not in self._hardware:
            from gpipe_cli.planning.cpu import measured

            self._hardware[ranks] = measured(config.hardware, config.precision, ranks, config.threads)
        return self._hardware[ranks]

    def layer_s(self, layer: int, num_samples: int, ranks: int, usual: int | None = None) -> tuple[float, float]:
        """Seconds of a layer forward and backward (the loss is the layer after the last).

        `usual`: samples of the micro-batches that cut=time measures; others' times follow by counting. None: as many.
        """
        forward, backward = self._counted_s(layer, num_samples, ranks)
        if self.config.cut == "time" and layer < self.num_layers:
            # The clock knows both passes together; the count divides them.
            usual = usual or num_samples
            scale = self._measure(usual, ranks)[layer] / sum(self._counted_s(layer, usual, ranks))
            return forward * scale, backward * scale
        return forward, backward

    def _counted_s(self, layer: int, num_samples: int, ranks: int) -> tuple[float, float]:
        count = self.network.layers[layer] if layer < self.num_layers else self.network.loss
        key = (id(count), num_samples, ranks)
        if key not in self._seconds:
            hardware = self.hardware(ranks)
            self._seconds[key] = (
                hardware.seconds(count.forward, num_samples),
                hardware.seconds(count.backward, num_samples),
            )
        return self._seconds[key]

    def _measure(self, num_samples: int, ranks: int) -> tuple[float, ...]:
        if (num_samples, ranks) not in self._measured:
            from gpipe_cli.planning.measuring import measured_layers

            self._measured[num_samples, ranks] = measured_layers(self.config, self._layers, num_samples, ranks)
        return self._measured[num_samples, ranks]

    def _balance(self, choice: Choice, num_samples: int, ranks: int) -> tuple[int, ...]:
        if choice.balance is not None:
            return choice.balance
        key = (replace(choice, balance=None), num_samples, ranks)
        if key not in self._cuts:
            if choice.cut == "memory":
                self._cuts[key] = cut(self._layer_bytes(choice, num_samples), choice.partitions)
            else:
                weights = cut_weights(_schedule(choice, self.config.schedule, remat_for_cut(choice.remat), None))
                self._cuts[key] = cut(self._layer_costs(choice, num_samples, ranks), choice.partitions, weights)
        return self._cuts[key]

    def _layer_costs(self, choice: Choice, num_samples: int, ranks: int) -> list[float]:
        """On this CPU what gpipe train cuts by; elsewhere predicted seconds, the loss with the last layer."""
        if self.config.hardware.name == "cpu" and choice.cut == "flops":
            whole = max(1, choice.batch_size // choice.micro_batches)
            return [_work(count, whole) for count in self.network.layers]
        seconds = [sum(self.layer_s(layer, num_samples, ranks)) for layer in range(self.num_layers + 1)]
        return [*seconds[:-2], seconds[-2] + seconds[-1]]

    def _layer_bytes(self, choice: Choice, num_samples: int) -> list[float]:
        stored = choice.micro_batches if choice.remat == "none" else 1
        return [
            count.num_parameters * self.bytes_per_parameter
            + stored * (count.saved_inside.at(num_samples) + sum(o.num_bytes.at(num_samples) for o in count.outputs))
            for count in self.network.layers
        ]

    def _check(self, choice: Choice) -> None:
        if choice.partitions > self.num_layers:
            problem = f"the network has {self.num_layers} layers to share out; use partitions={self.num_layers} or less"
            raise ConfigError("partitions", choice.partitions, problem)
        if choice.micro_batches > choice.batch_size:
            problem = f"there are only batch_size={choice.batch_size} samples to split; use a larger batch_size"
            raise ConfigError("micro_batches", choice.micro_batches, problem)
        if choice.balance is not None:
            try:
                check_balance(choice.balance, self.num_layers, choice.partitions)
            except ValueError as error:
                raise ConfigError("balance", choice.balance, str(error).partition(": ")[2]) from error


def _work(count: LayerCount, num_samples: int) -> float:
    """The engine's cost of a layer (LayerCost.work), from our count of it."""
    flops = sum(work.flops.at(num_samples) for work in count.forward)
    return combined_work(flops, sum(work.moved_bytes.at(num_samples) for work in count.forward), len(count.forward))


def _schedule(choice: Choice, policy: str, remat: str, kept: Sequence[int] | None) -> Schedule:
    try:
        schedule = make_schedule(
            choice.partitions, choice.micro_batches, policy, remat, choice.ranks, kept, choice.taper
        )
    except ValueError as error:
        raise ConfigError(None, None, str(error)) from error
    if not (choice.recompute_fresh and remat == "full"):
        return schedule
    operations = tuple(tuple(_recompute_all(ran, schedule.rematerialized)) for ran in schedule.operations)
    return replace(schedule, operations=operations)


def _recompute_all(operations: Iterable[Operation], already: frozenset[tuple[int, int]]) -> Iterator[Operation]:
    for op in operations:
        if op.kind is OperationKind.BACKWARD and (op.stage, op.micro_batch) not in already:
            yield Operation(op.stage, OperationKind.REMATERIALIZE, op.micro_batch)
        yield op
