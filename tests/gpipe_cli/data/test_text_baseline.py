from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpipe_cli.data.ngram import count_ngrams
from gpipe_cli.data.python_topics import python_topics
from gpipe_cli.data.text import TextSource
from gpipe_cli.data.text_baseline import trigram_bits_per_byte


def test_the_embedded_text_is_judged_on_the_bytes_of_whole_blocks() -> None:
    train, held_out = (np.frombuffer(text, dtype=np.uint8) for text in python_topics())
    seq_len = len(held_out) // 2 + 10  # one block: a good half of the text
    expected = count_ngrams(train).bits_per_byte(held_out[: seq_len + 1])
    assert trigram_bits_per_byte(TextSource(), seq_len) == pytest.approx(expected)
    assert 2.5 < expected < 3.5


def test_files_need_no_preparation_before(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc abd\n" * 100)
    source = TextSource(path=str(tmp_path / "text.txt"), cache=str(tmp_path / "cache"))
    assert 0 < trigram_bits_per_byte(source, seq_len=8) < 2
