"""A byte-trigram model: what counting alone predicts, the baseline of a byte-level language model on the same split.

Smoothing is interpolated Witten-Bell (Witten and Bell 1991; Chen and Goodman 1998, section 2.5), which has no constant
to tune: after a history h that was seen n(h) times and followed by t(h) different bytes,

    p(c | h) = (n(h, c) + t(h) p(c | h')) / (n(h) + t(h)),    h' the history without its first byte,

down to the uniform distribution over 256 bytes below the unigrams; a history never seen has p(c | h) = p(c | h').
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_BYTES = 256
_PIECE = 2**22  # bytes counted at a time: memory stays at the tables', whatever the length of the text

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Table:
    """Counts of the n-grams of one size, shape (256,) * size; of each history, how often seen, how many followers."""

    counts: Counts
    num_seen: Counts
    num_types: Counts


@dataclass(frozen=True)
class NgramModel:
    """Counts of all n-grams up to some order, a table for each size from 1 on."""

    tables: tuple[_Table, ...]

    def probabilities(self, text: Bytes) -> Iterator[npt.NDArray[np.float64]]:
        """p(byte | up to order - 1 bytes before it) of every byte of a 1-d uint8 array, piece by piece."""
        reach = len(self.tables) - 1
        for index in range(min(reach, len(text))):
            yield self._predict(text[: index + 1], index + 1)
        for start in range(reach, len(text), _PIECE):
            yield self._predict(text[start - reach : start + _PIECE], len(self.tables))

    def bits_per_byte(self, text: Bytes) -> float:
        """Mean of -log2 p over all bytes but the first, which a language model over blocks does not predict either."""
        pieces = self.probabilities(text)
        total = -np.log2(next(pieces)[1:]).sum() - sum(np.log2(piece).sum() for piece in pieces)
        return float(total / (len(text) - 1))

    def _predict(self, text: Bytes, order: int) -> npt.NDArray[np.float64]:
        """Probabilities of the bytes from number order - 1 on, each after the order - 1 bytes before it."""
        length = len(text) - order + 1
        columns = [text[index : index + length] for index in range(order)]
        probability = np.full(length, 1 / NUM_BYTES)
        for size in range(1, order + 1):
            table = self.tables[size - 1]
            history, byte = tuple(columns[order - size : order - 1]), columns[order - 1]
            num_seen, num_types = table.num_seen[history], table.num_types[history]
            ngram = (*history, byte)
            interpolated = table.counts[ngram] + num_types * probability
            # The denominator is zero for a history never seen, which says nothing.
            probability = np.where(num_seen > 0, interpolated / np.maximum(num_seen + num_types, 1), probability)
        return probability


def count_ngrams(text: Bytes, order: int = 3) -> NgramModel:
    """The model of a training text, a 1-d uint8 array; `order` 3 is the trigram (its table takes 134 MB).

    Raises ValueError for an order that is not 1, 2 or 3.
    """
    if order not in (1, 2, 3):
        raise ValueError(f"order={order}: expected 1, 2 or 3, tables grow by 256 with each")
    return NgramModel(tuple(_count(text, size) for size in range(1, order + 1)))


def _count(text: Bytes, size: int) -> _Table:
    counts = np.zeros(NUM_BYTES**size, dtype=np.int64)
    for start in range(0, len(text) - size + 1, _PIECE):
        piece = text[start : start + _PIECE + size - 1].astype(np.int64)
        length = len(piece) - size + 1
        codes = np.zeros(length, dtype=np.int64)
        for index in range(size):
            codes = codes * NUM_BYTES + piece[index : index + length]
        # Sorting the few distinct codes is cheaper than a table of 256^size for every piece.
        distinct, numbers = np.unique(codes, return_counts=True)
        counts[distinct] += numbers
    counts = counts.reshape((NUM_BYTES,) * size)
    return _Table(counts, np.asarray(counts.sum(axis=-1)), np.asarray((counts > 0).sum(axis=-1)))
