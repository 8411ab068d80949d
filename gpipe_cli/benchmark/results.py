"""What came of a configuration: its times round by round, and how they compare with others'."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpipe_cli.benchmark.grid import Case, baseline_of, reference_of, uncut
from gpipe_cli.benchmark.measure import Spell, Spread, ratio, spread

if TYPE_CHECKING:
    from gpipe_cli.benchmark.worker import End, Ready
    from gpipe_cli.errors import GpipeError


@dataclass
class Result:
    """One configuration measured, or the `error` that ended it. `spells`: per round, per rank."""

    case: Case
    ready: Ready | None = None
    spells: list[list[Spell]] = field(default_factory=list)
    end: End | None = None
    error: GpipeError | None = None

    @property
    def rounds(self) -> list[tuple[float, ...]]:
        """Step times of the first rank, in seconds, round by round."""
        return [ranks[0].step_times_s for ranks in self.spells]

    @property
    def step_times_s(self) -> list[float]:
        """All of them."""
        return list(itertools.chain.from_iterable(self.rounds))

    @property
    def spread(self) -> Spread:
        """Median and quartiles of the step time."""
        return spread(self.step_times_s)

    @property
    def samples_per_s(self) -> float:
        """Samples a second, by the median step."""
        return self.case.batch_size / self.spread.median_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of a network that reads text; None for pictures."""
        return None if self.case.seq_len is None else self.samples_per_s * self.case.seq_len

    @property
    def bubble_per_rank(self) -> list[float] | None:
        """The share of the step time in which each rank waited for others; None where that is not known."""
        total_s = sum(self.step_times_s)
        waits = [[spell.wait_s for spell in ranks] for ranks in zip(*self.spells, strict=True)]
        if not waits or any(wait is None for rank in waits for wait in rank):
            return None
        return [sum(wait for wait in rank if wait is not None) / total_s for rank in waits]

    @property
    def num_bytes_sent_per_rank(self) -> list[int] | None:
        """Bytes of tensors that each rank sends in a step."""
        return _all_known([spell.num_bytes_sent for spell in self.spells[-1]])

    @property
    def num_rematerializations(self) -> int | None:
        """Recomputed micro-batches in a step, over all ranks."""
        counts = _all_known([spell.num_rematerializations for spell in self.spells[-1]])
        return None if counts is None else sum(counts)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How many times as fast a configuration is as each baseline, None where that was not measured beside it.

    `speedup` is over the configuration that `over` names: the same with the fewest partitions, or a table's first row.
    """

    single: float | None = None
    naive: float | None = None
    torch: float | None = None
    speedup: float | None = None
    over: str | None = None


def compare(result: Result, others: Mapping[Case, Result]) -> Comparison:
    """A configuration of ours against those measured in the same rounds."""
    case = result.case

    def against(other: Case | None) -> float | None:
        found = others.get(uncut(other)) if other is not None else None
        return ratio(result.rounds, found.rounds) if found is not None and found.error is None else None

    reference = reference_of(case, [other.case for other in others.values() if other.error is None])
    return Comparison(
        single=against(baseline_of(case, "single")),
        naive=against(baseline_of(case, "naive")),
        torch=against(baseline_of(case, "torch")),
        speedup=against(reference),
        over=None if reference is None else f"K={reference.partitions} M={reference.micro_batches}",
    )


def by_case(results: Sequence[Result]) -> dict[Case, Result]:
    """Results by configuration, whatever the cut and the name."""
    return {uncut(result.case): result for result in results}


def _all_known(values: Sequence[int | None]) -> list[int] | None:
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None
