"""What every rank of a measured configuration does: build it once, then make steps whenever the bench asks for some.

The first rank talks to the bench over a socket and passes on what it is told; between its turns a configuration sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, Any

import torch

from gpipe_cli.benchmark.baselines import make_subject
from gpipe_cli.benchmark.measure import Stopwatch
from gpipe_cli.benchmark.subjects import Subject, gather_ingredients
from gpipe_cli.distributed.mesh import make_mesh
from gpipe_cli.errors import OutOfMemoryError, TrainingError
from gpipe_cli.pipeline.memory import ActivationMeter
from gpipe_cli.pipeline.schedule import Event
from gpipe_cli.training.communication import from_all, from_first
from gpipe_cli.training.loop import peak_memory_bytes

if TYPE_CHECKING:
    from gpipe_cli.benchmark.grid import Case
    from gpipe_cli.config_bench import BenchConfig
    from gpipe_cli.distributed.launch import RankContext

# How often a baseline tries each memory format, and by how many steps, after one that warms up.
_TRIALS, _TRIAL_STEPS = 2, 2


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the ranks of a configuration need to know; `address` is the bench's socket."""

    config: BenchConfig
    case: Case
    address: str


# What the bench asks for, and what it gets back, from the first rank.
@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Choose a memory format and warm up; the answer is a `Ready`."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Make so many steps; the answer is the list of the ranks' `Spell`s."""

    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Measure memory in a further step, and what happened when in another one; the answer is an `End`."""

    trace: bool


Request = Prepare | Measure | Finish


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a configuration turned out to be. `kept`: with remat=auto, the micro-batches that each stage need not
    recompute."""

    balance: tuple[int, ...]
    kept: tuple[int, ...] | None
    num_parameters: int
    device: str
    world_size: int
    num_threads: int
    layout: str


@dataclass(frozen=True, kw_only=True)
class End:
    """Per rank: peak memory of the process (GPU: allocated; CPU: resident), bytes of activations counted in one step
    (None where they cannot be), events of one step (empty: not asked for). Over all ranks: bytes of weights, gradients
    and what the optimizer keeps."""

    peak_memory_bytes: list[int]
    activation_bytes: list[int | None]
    events: list[list[Event]]
    parameter_memory_bytes: int


def serve(context: RankContext, order: Order) -> None:
    """One rank of a configuration, until the bench has all it wants. Collective.

    Raises OutOfMemoryError, and ConfigError or TrainingError for a network that cannot be trained so.
    """
    device = torch.device(context.device)
    try:
        _serve(context, order, device)
    except (RuntimeError, MemoryError, ValueError) as error:
        if _is_out_of_memory(error):
            raise OutOfMemoryError(context.device, str(error).splitlines()[0] if str(error) else "no memory") from error
        if isinstance(error, ValueError):  # what the engine, or a layer, says about sizes
            raise TrainingError(str(error).splitlines()[0]) from error
        raise


def _is_out_of_memory(error: BaseException) -> bool:
    texts = ("can't allocate memory", "DefaultCPUAllocator")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in texts)


def _serve(context: RankContext, order: Order, device: torch.device) -> None:
    if order.config.memory_gb is not None and device.type == "cuda":
        _limit_memory(order.config.memory_gb, device)
    groups = make_mesh(context.world_size, 1).process_groups()
    channel = Client(order.address, family="AF_UNIX") if context.is_main else None
    subject = make_subject(gather_ingredients(order.config, order.case, context, groups))
    stopwatch = Stopwatch(subject, groups, device)

    def answer(value: Any) -> None:
        if channel is not None:
            channel.send(value)

    while True:
        request: Request = from_first(groups, channel.recv if channel is not None else _nothing)
        if isinstance(request, Prepare):
            layout = _best_layout(subject, stopwatch, lambda choice: from_first(groups, choice))
            stopwatch.run(order.config.warmup_steps)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)  # what trying memory formats took does not count
            answer(_ready(subject, layout, context))
        elif isinstance(request, Measure):
            answer(from_all(groups, stopwatch.run(request.num_steps)))
        else:
            peak = peak_memory_bytes(device)
            activations = from_all(groups, _activation_bytes(subject, order.case))
            events = from_all(groups, _events(subject, stopwatch) if request.trace else [])
            answer(
                End(
                    peak_memory_bytes=from_all(groups, peak),
                    activation_bytes=activations,
                    events=events,
                    parameter_memory_bytes=sum(from_all(groups, _parameter_memory_bytes(subject))),
                )
            )
            return


def _nothing() -> None:
    """Ranks without a channel are told by the first."""


def _limit_memory(memory_gb: float, device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gb * 1e9 / total), device)


def _ready(subject: Subject, layout: str, context: RankContext) -> Ready:
    return Ready(
        balance=tuple(subject.balance),
        kept=subject.kept,
        num_parameters=subject.num_parameters,
        device=context.device.partition(":")[0],
        world_size=context.world_size,
        num_threads=context.num_threads,
        layout=layout,
    )


def _best_layout(subject: Subject, stopwatch: Stopwatch, agree: Callable[[Callable[[], str]], str]) -> str:
    """The fastest of the subject's memory formats, which it then works in."""
    if len(subject.layouts) == 1:
        return subject.layouts[0]
    times: dict[str, list[float]] = {layout: [] for layout in subject.layouts}
    for layout in subject.layouts * _TRIALS:
        subject.use(layout)
        stopwatch.run(1)
        times[layout] += stopwatch.run(_TRIAL_STEPS).step_times_s
    # The shortest: what else the machine does in one of a few steps could hide a difference of half.
    best = agree(lambda: min(times, key=lambda layout: min(times[layout])))
    subject.use(best)
    return best


def _activation_bytes(subject: Subject, case: Case) -> int | None:
    """Peak bytes that autograd held in a step; None where another tool hides what it keeps."""
    if case.baseline == "torch" and case.remat == "full":  # torch.utils.checkpoint packs and unpacks by its own hooks
        subject.step()
        return None
    with ActivationMeter(subject.tensors()) as meter:
        subject.step()
    return meter.peak_bytes


def _parameter_memory_bytes(subject: Subject) -> int:
    """Bytes of this rank's weights, gradients and optimizer state."""
    optimizer = subject.optimizer
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
            gradient = [] if parameter.grad is None else [parameter.grad]
            total += sum(tensor.nbytes for tensor in (parameter, *gradient, *state))
    return total


def _events(subject: Subject, stopwatch: Stopwatch) -> list[Event]:
    """The events of one more step, on a clock that all processes of a Linux machine share.

    time.perf_counter is CLOCK_MONOTONIC there, which counts from the start of the machine for everybody.
    """
    stopwatch.run(1)
    return list(subject.step().events)
