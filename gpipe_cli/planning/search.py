"""The fastest plan that fits, and what to change where none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpipe_cli.planning.planner import Choice, Plan, Planner

MOST_MICRO_BATCHES = 1024  # tried by micro_batches=auto
MOST_PARTITIONS_ONE_BY_ONE = 8  # beyond, partitions=auto tries powers of two


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change of the settings with which the network fits."""

    settings: str
    plan: Plan


def best(planner: Planner) -> Plan:
    """The fastest plan that fits; if none does, the one that is least too large. Raises ConfigError as `evaluate`."""
    # One after another: a plan of many stages and micro-batches holds each of their operations.
    return max((planner.evaluate(choice) for choice in candidates(planner)), key=_worth)


def _worth(plan: Plan) -> tuple[bool, float, int]:
    if plan.fits:
        return True, plan.samples_per_s, -plan.choice.partitions
    return False, plan.hardware.memory_bytes - max(plan.memory_bytes_per_rank), 0


def candidates(planner: Planner) -> Iterator[Choice]:
    """Every choice that the settings leave open."""
    config, first = planner.config, planner.first_choice()
    partitions: Iterable[int] = [first.partitions]
    if config.partitions == "auto":
        partitions = _counts(min(_most_ranks(planner), planner.num_layers))
    micro_batches: Iterable[int] = [first.micro_batches]
    if config.micro_batches == "auto":
        micro_batches = _powers(min(first.batch_size, MOST_MICRO_BATCHES))
    for number in partitions:
        for parts in micro_batches:
            yield _with(first, partitions=number, micro_batches=parts)


def suggestions(planner: Planner, plan: Plan) -> list[Suggestion]:
    """Single changes with which it fits, each the smallest of its kind; where none is enough, all of them together."""
    choice = plan.choice
    found = [_first_that_fits(planner, choice, changes) for changes in _single_changes(planner, choice)]
    if any(found):
        return [suggestion for suggestion in found if suggestion is not None]
    most = min(choice.batch_size, MOST_MICRO_BATCHES)
    together = (
        _with(choice, partitions=number, micro_batches=most, remat="full", cut="memory", balance=None, ranks=None)
        for number in _doubled(choice.partitions, _most_partitions(planner))
    )
    suggestion = _first_that_fits(planner, choice, together)
    return [] if suggestion is None else [suggestion]


def _first_that_fits(planner: Planner, before: Choice, changes: Iterable[Choice]) -> Suggestion | None:
    for choice in changes:
        plan = planner.evaluate(choice)
        if plan.fits:
            return Suggestion(settings=_difference(before, choice), plan=plan)
    return None


def _single_changes(planner: Planner, choice: Choice) -> Iterator[Iterable[Choice]]:
    """Choices of each kind of change, the smallest change first."""
    if choice.remat != "full":
        yield [_with(choice, remat="full")]
    most = min(choice.batch_size, MOST_MICRO_BATCHES)
    yield (_with(choice, micro_batches=number) for number in _doubled(2 * choice.micro_batches, most))
    if choice.partitions > 1 and choice.cut != "memory":
        yield [_with(choice, cut="memory", balance=None)]
    if choice.ranks is None:
        numbers = _doubled(choice.partitions + 1, _most_partitions(planner))
        yield (_with(choice, partitions=number, balance=None) for number in numbers)
    sizes = (choice.batch_size // 2**power for power in range(1, choice.batch_size.bit_length()))
    yield (_with(choice, batch_size=size, micro_batches=min(choice.micro_batches, size)) for size in sizes)


def _most_partitions(planner: Planner) -> int:
    """More partitions mean more accelerators, which can be rented; this machine's cores are what they are."""
    return (
        min(planner.num_layers, _most_ranks(planner)) if planner.config.hardware.name == "cpu" else planner.num_layers
    )


def _most_ranks(planner: Planner) -> int:
    if planner.config.hardware.name != "cpu":
        return planner.config.accelerators
    from gpipe_cli.distributed.devices import available_cores

    return min(planner.config.accelerators, available_cores())


def _with(choice: Choice, **changes: object) -> Choice:
    return replace(choice, **changes)  # type: ignore[arg-type]


def _difference(before: Choice, after: Choice) -> str:
    names = ("partitions", "micro_batches", "batch_size", "remat", "cut")
    return " ".join(f"{name}={getattr(after, name)}" for name in names if getattr(before, name) != getattr(after, name))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _counts(most: int) -> list[int]:
    if most <= MOST_PARTITIONS_ONE_BY_ONE:
        return list(range(1, most + 1))
    return sorted({*_powers(most), most})


def _doubled(first: int, most: int) -> list[int]:
    """first, 2 first, 4 first ... and the most."""
    if first > most:
        return []
    numbers = [first]
    while numbers[-1] * 2 <= most:
        numbers.append(numbers[-1] * 2)
    return numbers if numbers[-1] == most else [*numbers, most]
