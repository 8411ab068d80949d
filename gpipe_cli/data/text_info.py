"""What the rest of the program knows of a text: plain facts that travel between ranks and into checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_cli.data.info import DataInfo


@dataclass(frozen=True)
class TextInfo(DataInfo):
    """Facts of a prepared text; `num_train` and `num_eval` count blocks of `seq_len` predicted tokens.

    `classes` is empty: the network's outputs are the `vocab_size` tokens. `eval_bytes_per_token` is the mean over the
    held-out text, by which a loss per token becomes bits per byte. `text_digest` says which text and split it was.
    """

    seq_len: int
    vocab_size: int
    eval_bytes_per_token: float
    text_digest: str

    @property
    def num_classes(self) -> int:
        return self.vocab_size
