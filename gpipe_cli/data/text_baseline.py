"""What a byte-trigram model makes of the same text and split: the figure that a trained language model has to beat."""

from __future__ import annotations

import dataclasses

from gpipe_cli.data.ngram import count_ngrams
from gpipe_cli.data.text import TextSource, num_blocks, prepare_text, read_tokens


def trigram_bits_per_byte(source: TextSource, seq_len: int) -> float:
    """Held-out bits per byte of the trigram model of the training text, counted in less than a second a 10 MB.

    For bytes, over exactly the bytes that the blocks of `seq_len` predict; for other tokenizers over the whole held-out
    text. Raises ConfigError as prepare_text does.
    """
    in_bytes = dataclasses.replace(source, tokenizer=None)
    prepare_text(in_bytes, seq_len)
    held_out = read_tokens(in_bytes, "eval")
    if source.tokenizer is None:
        held_out = held_out[: num_blocks(len(held_out), seq_len) * seq_len + 1]
    return count_ngrams(read_tokens(in_bytes, "train")).bits_per_byte(held_out)
