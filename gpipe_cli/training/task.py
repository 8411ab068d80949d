"""What kind of samples a network is trained on: everything in training that differs between pictures and text.

Session, loop and evaluation know this interface only. `prepare_task` is the one place that chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from gpipe_cli.training.communication import from_first
from gpipe_cli.training.losses import LossFn

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig
    from gpipe_cli.data.info import DataInfo
    from gpipe_cli.pipeline import Layers, ProcessGroups

Split = Literal["train", "eval"]


class Result(Protocol):
    """What an evaluation found. `loss`: mean cross-entropy without smoothing; `score`: larger is better."""

    @property
    def loss(self) -> float: ...

    @property
    def score(self) -> float: ...

    def metrics(self) -> dict[str, float]:
        """The row of metrics.jsonl."""

    def sentence(self) -> str:
        """The same for the screen."""


class Counter(Protocol):
    """Counts over batches of any size, on their device, without synchronising."""

    def update(self, outputs: Any, targets: Tensor) -> None: ...

    def counts(self) -> Tensor:
        """float64 (n,); counts of several batches or ranks may be added."""


class Batches(Protocol):
    """Pairs of inputs and targets."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


class Task(Protocol):
    """One kind of samples, prepared. Batches are asked for on the first stage's rank only."""

    unit: str  # what speed is counted in: "images", "tokens"
    units_per_sample: int

    @property
    def info(self) -> DataInfo: ...

    def layers(self) -> Layers:
        """The network, nothing of it built. Raises ConfigError."""

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Full names of parameters that are one and the same."""

    def sample(self, num_samples: int, *, meta: bool) -> Tensor:
        """Made-up inputs of the right shape and type, without data or with some."""

    def loss_fn(self) -> LossFn:
        """The training loss."""

    def train_batches(self, epoch: int, start_batch: int) -> Batches:
        """Shuffled whole mini-batches of an epoch, from one on."""

    def eval_batches(self, split: Split = "eval") -> Batches:
        """Every sample of a split once, in order, not augmented."""

    def report_to(self, message: Callable[[str], None]) -> None:
        """Where lines for the user go, such as which pictures are left out."""

    def counter(self) -> Counter: ...

    def result(self, counts: Sequence[float]) -> Result:
        """Of the sums of all counts. Raises ValueError when nothing was counted."""

    def rates(self, samples_per_s: float) -> Mapping[str, float]:
        """Speeds besides samples/s that this kind of samples is measured in, by the name of their field."""

    def summary_facts(self, result: Any) -> Mapping[str, Any]:
        """Fields of `summary.json` that only this kind of samples has."""


def prepare_task(config: TrainConfig, groups: ProcessGroups | None) -> Task:
    """Make the data ready on the first rank, tell the others its facts. Collective.

    Raises ConfigError, one line, for data that are missing, damaged or do not fit the network.
    """
    if config.dataset.name == "text":
        from gpipe_cli.training.language_task import LanguageTask, prepare_language

        return LanguageTask(config, from_first(groups, lambda: prepare_language(config)))
    from gpipe_cli.data.datasets import prepare
    from gpipe_cli.training.picture_task import PictureTask

    return PictureTask(config, from_first(groups, lambda: prepare(config.dataset, config.seed)))
