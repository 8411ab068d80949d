"""Which configurations are measured, which of them cannot be, and which take turns.

Configurations that are compared with one another form a group: they are measured in the same rounds, so that whatever
else the machine does meanwhile meets all of them alike. No torch here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_cli.config import ModelConfig
    from gpipe_cli.config_bench import BenchConfig

SINGLE, NAIVE, TORCH = "single", "naive", "torch"
# The grid where nothing is said. In the YAML file these would win over a suite.
DEFAULT_PARTITIONS, DEFAULT_MICRO_BATCHES, DEFAULT_REMAT = (1, 2), (1, 4, 8), ("full", "none")
DEFAULT_BATCH_SIZE, DEFAULT_IMAGE_SIZE = 32, 64
DEFAULT_NUM_CLASSES = 1000  # ImageNet's
# What torch.distributed.pipelining's ScheduleGPipe can do: all stages checkpointed, or none.
TORCH_REMAT = ("full", "none")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration to be measured. `baseline`: None for our own pipeline, else which other way it is done.

    `image_size` is None for a network that reads text. `balance` is the cut, None for one that is found by the layers'
    costs; `kept` is what remat=auto keeps with it. `name` is what the paper's table calls it.
    """

    model: ModelConfig = field(hash=False)  # it holds a dict; equality still looks at it
    partitions: int
    micro_batches: int
    batch_size: int
    image_size: int | None
    num_classes: int
    remat: str
    schedule: str
    taper: bool = False
    baseline: str | None = None
    balance: tuple[int, ...] | None = None
    kept: tuple[int, ...] | None = None
    name: str | None = None

    @property
    def seq_len(self) -> int | None:
        """Tokens of a sample; None for pictures."""
        return self.model.seq_len

    def __str__(self) -> str:
        words = [f"K={self.partitions}", f"M={self.micro_batches}", f"remat={self.remat}"]
        if self.schedule != "gpipe":
            words.append(self.schedule)
        if self.taper:
            words.append("tapered")
        if self.baseline == SINGLE:
            words = []
        if self.baseline is not None:
            words.insert(0, f"baseline={self.baseline}")
        return " ".join([self.name, *words] if self.name is not None else words)


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A configuration that cannot be measured here, and why: a part of a sentence that says what to do."""

    case: Case
    reason: str

    def __str__(self) -> str:
        return f"{self.case}: {self.reason}"


def grid(config: BenchConfig) -> list[Case]:
    """Every combination of the settings that take a list, in the order of the paper's tables: by micro-batches."""
    combinations = itertools.product(
        config.taper,
        config.schedule,
        config.remat or DEFAULT_REMAT,
        config.micro_batches or DEFAULT_MICRO_BATCHES,
        config.partitions or DEFAULT_PARTITIONS,
    )
    return [
        Case(
            model=config.model,
            partitions=partitions,
            micro_batches=micro_batches,
            batch_size=config.batch_size or DEFAULT_BATCH_SIZE,
            image_size=image_size(config, DEFAULT_IMAGE_SIZE),
            num_classes=num_classes(config),
            remat=remat,
            schedule=schedule,
            taper=taper,
        )
        for taper, schedule, remat, micro_batches, partitions in dict.fromkeys(combinations)
    ]


def image_size(config: BenchConfig, default: int) -> int | None:
    """Pixels of the pictures; None for a network that reads text."""
    return None if config.model.seq_len is not None else config.image_size or default


def num_classes(config: BenchConfig) -> int:
    """Numbers that a label, or a token, may be."""
    return config.model.vocab_size if config.model.name == "transformer" else config.num_classes or DEFAULT_NUM_CLASSES


def why_impossible(case: Case, num_layers: int, num_ranks: int) -> str | None:
    """The reason why no machine could run the configuration, None if there is none."""
    if case.micro_batches > case.batch_size:
        return f"there are only batch_size={case.batch_size} samples to split into micro_batches"
    if case.taper and not 3 <= case.micro_batches < case.batch_size:
        return f"taper=true has no effect on micro_batches={case.micro_batches} of batch_size={case.batch_size}"
    if case.partitions > num_layers:
        return f"the network has only {num_layers} layers to cut into partitions"
    if case.schedule == "interleaved" and case.partitions % num_ranks:
        return f"schedule=interleaved needs a multiple of ranks={num_ranks} partitions"
    if case.baseline == TORCH:
        if case.model.tied:
            return "ScheduleGPipe knows no parameters that are shared by stages; use model.tied=false"
        if case.remat not in TORCH_REMAT:
            return f"ScheduleGPipe knows no remat={case.remat}"
        if case.batch_size % case.micro_batches:
            return f"ScheduleGPipe needs equal micro-batches: batch_size={case.batch_size} is not a multiple"
        if num_ranks != case.partitions:
            return f"ScheduleGPipe needs a process for each partition, there are ranks={num_ranks}"
    return None


def baseline_of(case: Case, kind: str) -> Case | None:
    """What `case` is compared with. None where there is nothing to compare: a single partition is no pipeline."""
    if kind == SINGLE:
        return uncut(case, partitions=1, micro_batches=1, remat="none", schedule="gpipe", taper=False, baseline=SINGLE)
    if case.partitions == 1:
        return None
    if kind == NAIVE:
        if case.micro_batches == 1 and case.schedule == "gpipe":
            return None  # it is the row itself
        # One micro-batch: the cut may differ, as the last partition then recomputes nothing.
        return uncut(case, baseline=NAIVE, micro_batches=1, schedule="gpipe", taper=False)
    if case.schedule == "gpipe":
        return replace(case, baseline=TORCH, taper=False, kept=None, name=None)
    return uncut(
        case, baseline=TORCH, schedule="gpipe", taper=False
    )  # the cut for another schedule would be to its disadvantage


def uncut(case: Case, **changes: Any) -> Case:
    """A configuration with `changes`, without what follows from its cut and without the name."""
    return replace(case, **{"balance": None, "kept": None, "name": None, **changes})


def groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Our configurations that differ only in the number of partitions and in whether micro-batches are tapered, in the
    order of their first members."""
    found: dict[Case, list[Case]] = {}
    for case in cases:
        found.setdefault(uncut(case, partitions=0, taper=False), []).append(case)
    return list(found.values())


def with_baselines(group: Sequence[Case], baselines: Sequence[str]) -> list[Case]:
    """A group with what its members are compared with, each once."""
    wanted = [baseline_of(case, kind) for kind in baselines for case in group]
    return list(dict.fromkeys([*group, *(case for case in wanted if case is not None)]))


def reference_of(case: Case, among: Iterable[Case]) -> Case | None:
    """The configuration over which the speed-up of `case` is counted: the fewest partitions, all else being equal."""
    peers = [other for other in among if uncut(other, partitions=0) == uncut(case, partitions=0)]
    return min(peers, key=lambda other: other.partitions, default=None)
