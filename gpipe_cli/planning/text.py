"""A plan on the screen. GB is 10^9 bytes, as in the paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpipe_cli.pipeline.schedule import OperationKind
from gpipe_cli.planning.planner import Plan
from gpipe_cli.planning.search import Suggestion
from gpipe_cli.reporting.paper import BYTES_PER_PARAMETER, PRINTED_GB, TABLE1, TRANSFORMER_SIZES

if TYPE_CHECKING:
    from gpipe_cli.config_plan import PlanConfig

MOST_STAGES = 24  # longer tables show both ends


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: the first to the left, the others to the right."""
    table = [list(headings), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]


def describe(config: PlanConfig, plan: Plan, bytes_per_parameter: float) -> list[str]:
    """What is planned, stage by stage, and what comes of it."""
    choice, hardware = plan.choice, plan.hardware
    samples = f"{min(plan.sizes)} to {max(plan.sizes)}" if choice.taper else str(plan.num_samples)
    lines = [
        f"{network_label(config)}: {plan.num_parameters:,} parameters in {sum(plan.balance)} layers and the loss; "
        f"SIMULATED for {count(plan.schedule.num_ranks, 'accelerator')} of hardware={hardware.name}",
        f"mini-batch of {choice.batch_size} in {count(choice.micro_batches, 'micro-batch', 'es')} of {samples}, "
        f"schedule={config.schedule} remat={choice.remat} precision={config.precision}; "
        f"{bytes_per_parameter:g} bytes a parameter ({_parameter_words(config)})",
        f"reached rates: {hardware.flops_per_s / 1e12:.4g} TFLOP/s, memory {hardware.bytes_per_s / 1e9:.4g} GB/s, "
        f"{hardware.overhead_s * 1e6:.3g} us an operation, link {_link(plan)}",
        "",
        *_stage_table(plan),
        "",
    ]
    return [*lines, *_result(plan), *_beside_the_paper(config, plan)]


def suggest(plan: Plan, suggestions: Sequence[Suggestion]) -> list[str]:
    """What to change when a plan does not fit."""
    if plan.fits:
        return []
    if not suggestions:
        return ["nothing found that fits: take hardware with more memory, or a smaller network"]
    lines = ["it would fit with"]
    rows = []
    for suggestion in suggestions:
        other = suggestion.plan
        rows.append(
            [
                f"  {suggestion.settings}",
                f"{max(other.memory_bytes_per_rank) / 1e9:.2f} GB",
                f"{other.samples_per_s:.4g} samples/s",
                _balance_words(other) if "cut=" in suggestion.settings else "",
            ]
        )
    return [*lines, *aligned(["", "largest", "predicted", ""], rows)[1:]]


def network_label(config: PlanConfig) -> str:
    """Name and size of the network in a few characters."""
    model = config.model
    if model.name == "amoebanet":
        return f"amoebanet-{model.variant} ({model.layers}, {model.filters})"
    if model.name == "module":
        return f"module {model.factory}"
    return f"{model.name} of {model.layers} blocks"


def count(number: int, noun: str, plural: str = "s") -> str:
    """ "1 stage", "2 stages"."""
    return f"{number} {noun}{plural * (number != 1)}"


def _parameter_words(config: PlanConfig) -> str:
    if config.bytes_per_parameter is not None:
        return "as set"
    return f"weight 4, gradient 4, and what {config.optimizer.name} keeps"


def _link(plan: Plan) -> str:
    if plan.schedule.num_ranks == 1:
        return "unused"
    return f"{plan.hardware.link_bytes_per_s / 1e9:.4g} GB/s after {plan.hardware.link_latency_s * 1e6:.3g} us"


def _stage_table(plan: Plan) -> list[str]:
    headings = [
        "stage", "rank", "layers", "parameters", "their GB", "full GB", "except_last", "none", "forward ms",
        "recompute", "backward", "transfer", "update",
    ]  # fmt: skip
    rows = []
    for number, stage in enumerate(plan.stages):
        cost, by_remat = stage.cost, plan.activation_bytes_by_remat[number]
        names = stage.first_name if len(stage.layers) == 1 else f"{stage.first_name}..{stage.last_name}"
        seconds = [cost.forward_s, cost.seconds(OperationKind.REMATERIALIZE), cost.backward_s, cost.transfer_s]
        rows.append(
            [
                f"{number}: {names}",
                str(plan.schedule.rank_of_stage[number]),
                str(len(stage.layers)),
                f"{stage.num_parameters:,}",
                f"{stage.parameter_bytes / 1e9:.3f}",
                *(f"{by_remat[remat] / 1e9:.3f}" for remat in ("full", "except_last", "none")),
                *(f"{second * 1e3:.3g}" for second in (*seconds, cost.update_s)),
            ]
        )
    lines = aligned(headings, rows)
    if len(rows) > MOST_STAGES:
        half = MOST_STAGES // 2
        left_out = len(rows) - 2 * half
        lines = [*lines[: 1 + half], f"... {left_out} more stages between ...", *lines[-half:]]
    legend = "GB under full, except_last and none: peak activations with that remat; times: of one micro-batch"
    measured = ", MEASURED here in short steps" if plan.is_timed else ""
    return [*lines, f"({legend}{measured}; update: of the optimizer, once)"]


def _result(plan: Plan) -> list[str]:
    simulation, hardware = plan.simulation, plan.hardware
    largest = max(range(plan.schedule.num_ranks), key=lambda rank: plan.memory_bytes_per_rank[rank])
    recomputed, all_passes = len(plan.schedule.rematerialized), len(plan.stages) * plan.choice.micro_batches
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return [
        f"cut           {_balance_words(plan)}",
        f"step          {simulation.step_time_s:.4g} s, {plan.samples_per_s:.4g} samples/s (simulated); "
        f"bubble {100 * simulation.bubble_fraction:.1f} %; {recomputed} of {all_passes} passes recomputed",
        f"memory        {plan.parameter_bytes / 1e9:.2f} GB parameters, {plan.activation_bytes / 1e9:.2f} GB "
        "activations at their peaks, over all ranks",
        f"largest rank  {plan.memory_bytes_per_rank[largest] / 1e9:.2f} GB on rank {largest} of "
        f"{hardware.memory_bytes / 1e9:.2f} GB for the network: {verdict}",
    ]


def _beside_the_paper(config: PlanConfig, plan: Plan) -> list[str]:
    """The column of Table 1 that has the planned network and accelerators, if there is one."""
    model = config.model
    for size in TABLE1:
        sizes: dict[str, object] = {"name": size.architecture, "layers": size.layers}
        sizes |= TRANSFORMER_SIZES if size.filters is None else {"variant": "D", "filters": size.filters}
        if size.accelerators != plan.schedule.num_ranks or any(getattr(model, name) != sizes[name] for name in sizes):
            continue
        unit = PRINTED_GB[size.architecture]
        gb = "GB" if unit == 1e9 else "GiB"
        return [
            f"the paper     Table 1, {size.name}: {size.parameter_bytes / unit:.5g} {gb} parameters, "
            f"{size.activation_bytes / unit:.5g} {gb} activations; at its {BYTES_PER_PARAMETER} bytes a parameter ours "
            f"would be {plan.num_parameters * BYTES_PER_PARAMETER / unit:.5g} {gb}"
        ]
    return []


def _balance_words(plan: Plan) -> str:
    return f"balance=[{','.join(map(str, plan.balance))}]" if len(plan.balance) <= MOST_STAGES else "by layers as above"
