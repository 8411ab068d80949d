"""What must be known before anything is measured: which rows can run here, and where each is cut.

Computes with torch (a user's factory may build modules, layer costs come from the meta device), so it runs apart from
the process that starts the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpipe_cli.benchmark.data import sample
from gpipe_cli.benchmark.grid import Case, Impossible, why_impossible
from gpipe_cli.distributed.devices import available_cores, count_gpus, plan_ranks
from gpipe_cli.distributed.heap import keep_freed_memory
from gpipe_cli.errors import ConfigError

if TYPE_CHECKING:
    from gpipe_cli.config import ModelConfig
    from gpipe_cli.config_bench import BenchConfig
    from gpipe_cli.distributed.devices import RankPlan
    from gpipe_cli.pipeline import Layers
    from gpipe_cli.pipeline.counting import NetworkCount

# Weights, gradients and the two averages of RMSProp with momentum, each of four bytes.
BYTES_PER_PARAMETER = 16
# What a backward pass holds besides the activations: gradients of them, and inputs kept for recomputation.
ACTIVATION_MARGIN = 1.2


def rank_plan(config: BenchConfig, case: Case) -> RankPlan:
    """The processes of a configuration. Raises ConfigError when there are none such."""
    return plan_ranks(
        partitions=case.partitions,
        replicas=1,
        device=config.device,
        ranks=min(config.ranks, case.partitions) if config.ranks is not None else None,
        threads=None if case.baseline == "single" else config.threads,  # that one has all cores
    )


def survey(config: BenchConfig, cases: Sequence[Case]) -> list[Case | Impossible]:
    """Each configuration with its cut and what it keeps, or why it cannot be measured here.

    Raises ConfigError for a bad network, and for a budget that nothing would depend on.
    """
    networks = _Networks(config)
    return [_survey(config, case, networks) for case in cases]


def _survey(config: BenchConfig, case: Case, networks: _Networks) -> Case | Impossible:
    reason = _too_few_devices(config, case)
    if reason is None:
        try:
            plan = rank_plan(config, case)
        except ConfigError as error:
            if error.key == "device":
                raise
            reason = str(error)
        else:
            _check_budget(config, plan)
    if reason is None:
        network = networks.of(case)
        reason = why_impossible(case, len(network.layers), plan.num_ranks) or _too_little_memory(
            case, network, plan.device_type
        )
    if reason is not None:
        return Impossible(case=case, reason=reason)
    case = replace(case, balance=network.balance(config, case, plan))
    if case.remat != "auto":
        return case
    try:
        return replace(case, kept=network.kept(config, case, plan))
    except ConfigError as error:
        return Impossible(case=case, reason=str(error))


def _check_budget(config: BenchConfig, plan: RankPlan) -> None:
    if config.memory_gb is not None and plan.device_type == "cpu" and "auto" not in (config.remat or ()):
        problem = "limits a GPU's memory, and on a CPU what remat=auto keeps; leave it out, or add auto to remat"
        raise ConfigError("memory_gb", config.memory_gb, problem)


def _too_few_devices(config: BenchConfig, case: Case) -> str | None:
    """Rows of the paper need what the paper had, an accelerator for each partition."""
    if config.suite is None:
        return None
    needed = case.partitions
    if config.device == "cpu":
        found = available_cores()
        return None if found >= needed else f"needs {needed} cores, {found} were found"
    found = count_gpus()
    if found >= needed:
        return None
    gpus = f"needs {needed} GPU{'s' * (needed > 1)}, {found or 'none'} {'was' if found < 2 else 'were'} found"
    return gpus + (" (device=cpu measures on the cores instead)" if found == 0 else "")


def _too_little_memory(case: Case, network: _Network, device_type: str) -> str | None:
    """On a CPU the system ends a process that asks for too much, and perhaps another; a GPU says so itself."""
    free = _free_bytes()
    if device_type != "cpu" or free is None:
        return None
    from gpipe_cli.pipeline.sizes import split_sizes

    parts = split_sizes(case.batch_size, case.micro_batches, case.taper)
    samples = case.batch_size if case.remat == "none" else max(parts)
    activations = network.activation_bytes(case, samples)
    needed = round(BYTES_PER_PARAMETER * network.num_parameters + ACTIVATION_MARGIN * activations)
    if needed <= free:
        return None
    sizes = f"needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    return f"{sizes}; use a smaller batch_size or model"


def _free_bytes() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _page_cache_bytes()
    except (ValueError, OSError):
        return None


def _page_cache_bytes() -> int:
    """What the system holds as a cache of files and gives up when asked (Linux)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    except OSError:
        return 0
    return max(0, sizes.get("MemAvailable", 0) - sizes.get("MemFree", 0)) * 1024


class _Networks:
    """The networks of all rows, each built once."""

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        self._known: list[tuple[ModelConfig, _Network]] = []

    def of(self, case: Case) -> _Network:
        from gpipe_cli.training.networks import build_network

        for known, network in self._known:
            if known == case.model:
                return network
        network = _Network(build_network(case.model, case.num_classes, case.image_size, self._config.seed))
        self._known.append((case.model, network))
        return network


class _Network:
    """Layers and what they cost, counted on the meta device (or measured) when it is first needed."""

    def __init__(self, layers: Layers) -> None:
        from gpipe_cli.pipeline.layers import named_layers

        self.layers = named_layers(layers)
        self._layers = layers
        self._costs: dict[tuple[Any, ...], Sequence[float]] = {}
        self._num_parameters: int | None = None
        self._activation_bytes: dict[int, int] = {}
        self._count: NetworkCount | None = None

    @property
    def num_parameters(self) -> int:
        if self._num_parameters is None:
            modules = [layer.build_without_data(index) for index, layer in enumerate(self.layers)]
            self._num_parameters = sum(p.numel() for module in modules for p in module.parameters())
        return self._num_parameters

    def balance(self, config: BenchConfig, case: Case, plan: RankPlan) -> tuple[int, ...]:
        """The cut of a configuration: its own if that fits, the given one, or as the engine makes it."""
        from gpipe_cli.pipeline.partition import check_balance, cut
        from gpipe_cli.pipeline.policies import weights_for_cut

        if case.partitions == 1:
            return (len(self.layers),)
        if case.balance is not None and sum(case.balance) == len(self.layers):
            return case.balance
        if config.balance is not None and len(config.balance) == case.partitions:
            try:
                return check_balance(config.balance, len(self.layers), case.partitions)
            except ValueError as error:
                raise ConfigError("balance", config.balance, str(error).partition(": ")[2]) from error
        weights = weights_for_cut(
            case.partitions, case.micro_batches, case.schedule, case.remat, plan.num_ranks, case.taper
        )
        return cut(self._cost(config, case, plan), case.partitions, weights)

    def kept(self, config: BenchConfig, case: Case, plan: RankPlan) -> tuple[int, ...]:
        """What remat=auto keeps with the configuration's cut. Raises ConfigError for a budget that is too small."""
        import torch

        from gpipe_cli.pipeline.policies import make_schedule
        from gpipe_cli.training.rematerialization import count_for_budget, found_budget, given_budget, keep_within

        assert case.balance is not None
        if config.memory_gb is not None:
            budgets = [given_budget(config.memory_gb, plan.device_type)] * plan.num_ranks
        else:
            devices = [torch.device(plan.device_type, rank) for rank in range(plan.num_ranks)]
            budgets = [found_budget(device, plan.num_ranks) for device in devices]
        if self._count is None:
            self._count = count_for_budget(self._layers, sample(case, 1), config.precision, plan.device_type)
        return keep_within(
            budgets,
            self._count,
            balance=case.balance,
            schedule=make_schedule(
                case.partitions, case.micro_batches, case.schedule, "full", plan.num_ranks, taper=case.taper
            ),
            batch_size=case.batch_size,
            optimizer=config.optimizer,
        ).kept

    def _cost(self, config: BenchConfig, case: Case, plan: RankPlan) -> Sequence[float]:
        import torch

        from gpipe_cli.pipeline.profile import count_costs, measure_layers

        samples = max(1, case.batch_size // case.micro_batches)
        by = config.cut or "time"
        key = (by, samples, plan.num_threads)
        if key in self._costs:
            return self._costs[key]
        try:
            if by == "time":
                inputs = sample(case, samples, torch.Generator().manual_seed(0))
                if config.channels_last and inputs.dim() == 4:
                    inputs = inputs.contiguous(memory_format=torch.channels_last)
                keep_freed_memory()
                torch.set_num_threads(plan.num_threads)
                found: Sequence[float] = measure_layers(self._layers, inputs, torch.device(plan.device_type))
            else:
                found = [cost.work for cost in count_costs(self._layers, sample(case, samples))]
        except (RuntimeError, NotImplementedError, ValueError) as error:
            problem = f"the layers cannot be costed ({str(error).splitlines()[0]})"
            problem += "; use cut=time or balance=[…]" if by == "flops" else "; use cut=flops or balance=[…]"
            raise ConfigError("cut", by, problem) from error
        self._costs[key] = found
        return found

    def activation_bytes(self, case: Case, samples: int) -> int:
        """Bytes held for the backward pass of `samples` samples through all layers; 0 where it cannot be counted."""
        from gpipe_cli.pipeline.memory import ActivationMeter
        from gpipe_cli.pipeline.recording import Attention

        if samples not in self._activation_bytes:
            value: Any = sample(case, samples)
            try:
                with ActivationMeter() as meter, Attention(fused=False):
                    for index, layer in enumerate(self.layers):
                        module = layer.build_without_data(index)
                        value = module.to("meta")(value)
                self._activation_bytes[samples] = meter.peak_bytes
            except Exception:  # a user's layers need not run without computing: then nothing is known, and it is tried
                self._activation_bytes[samples] = 0
        return self._activation_bytes[samples]
