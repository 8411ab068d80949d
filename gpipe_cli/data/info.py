"""What the rest of the program knows of a data set: plain facts that travel between ranks and into checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DataInfo:
    """Facts of a prepared data set.

    name: as in `dataset.name`. num_train, num_eval: samples of each split, unreadable files included. classes: the name
    of label 0, 1, ...; the training split defines them, for both splits.
    """

    name: str
    num_train: int
    num_eval: int
    classes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def some_names(names: Sequence[str]) -> str:
    """The first names for a line on the screen, and how many there are."""
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")
