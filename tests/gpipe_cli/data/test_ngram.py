from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from gpipe_cli.data import ngram
from gpipe_cli.data.ngram import NgramModel, count_ngrams
from gpipe_cli.data.python_topics import python_topics


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


def probabilities(model: NgramModel, text: bytes) -> list[float]:
    return np.concatenate(list(model.probabilities(as_bytes(text)))).tolist()


def plain_probability(training: bytes, history: bytes, byte: int) -> float:
    """Witten-Bell as it is defined, one number at a time."""
    lower = plain_probability(training, history[1:], byte) if history else 1 / 256
    size = len(history)
    followers = Counter(
        training[place + size] for place in range(len(training) - size) if training[place : place + size] == history
    )
    if not followers:
        return lower
    return (followers[byte] + len(followers) * lower) / (sum(followers.values()) + len(followers))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_are_interpolated_witten_bell(order: int) -> None:
    training, text = b"abracadabra, abra", b"abrac zzabra"
    found = probabilities(count_ngrams(as_bytes(training), order), text)
    expected = [plain_probability(training, text[max(0, i - order + 1) : i], text[i]) for i in range(len(text))]
    assert found == pytest.approx(expected, rel=1e-12)


def test_probabilities_after_a_history_sum_to_one() -> None:
    model = count_ngrams(as_bytes(b"the cat sat on the mat"))
    for history in (b"th", b"zz", b"\x00t"):
        total = sum(probabilities(model, history + bytes([byte]))[-1] for byte in range(256))
        assert total == pytest.approx(1.0, abs=1e-12)


def test_bits_per_byte_is_the_mean_over_all_bytes_but_the_first() -> None:
    model = count_ngrams(as_bytes(b"abababab"))
    expected = -sum(math.log2(p) for p in probabilities(model, b"abab")[1:]) / 3
    assert model.bits_per_byte(as_bytes(b"abab")) == pytest.approx(expected)


def test_longer_histories_predict_english_better_and_nothing_predicts_noise() -> None:
    text = as_bytes(python_topics()[0][:60_000])
    half = len(text) // 2
    bits = [count_ngrams(text[:half], order).bits_per_byte(text[half:]) for order in (1, 2, 3)]
    assert 5 > bits[0] > bits[1] > bits[2] > 1
    noise = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)
    assert count_ngrams(text, 3).bits_per_byte(noise) >= 8.0


def test_long_texts_are_counted_and_judged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = as_bytes(b"she sells sea shells by the sea shore")
    whole = count_ngrams(text).bits_per_byte(text)
    monkeypatch.setattr(ngram, "_PIECE", 5)
    assert count_ngrams(text).bits_per_byte(text) == pytest.approx(whole, rel=1e-14)


def test_texts_shorter_than_the_order_are_counted() -> None:
    model = count_ngrams(as_bytes(b"a"))
    assert probabilities(model, b"aa") == pytest.approx([(1 + 1 / 256) / 2] * 2)


def test_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="order=4: expected 1, 2 or 3"):
        count_ngrams(as_bytes(b"a"), 4)
