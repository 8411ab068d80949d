"""Sizes of the language model by name: the paper's, with what it reports of them, and a small default.

Sources: [P] Huang et al. 2019, arXiv 1811.06965, section 3: width 2048, feed-forward width 8192, 32 heads, vocabulary
32k, sequences of 1024; [L] tensorflow/lingvo, `tasks/lm/params/one_billion_wds.py`: the vocabulary is 32,000, dropout
0.1; [B] the authors' announcement of March 2019.

How the counts decide what has a bias. A block has 12 D^2 weights in six matrices. The difference of the two exact
figures of Table 1, (785.8M - 282.2M) / 10 blocks, is 50.36M +- 0.01M a block, and 12 D^2 is 50.33M: with feed-forward
biases and two layer norms a block has 50.35M, with biases in the attention projections as well 50.36M. Beside 3 blocks,
131.1M of the 282.2M remain: two separate matrices of 32,000 x 2048 and a bias of the softmax (a vocabulary of 32,768
would give 134.2M). This network, without attention biases, has 282.158M and 785.659M, 0.015 % and 0.018 % below the
paper's; attention biases, which lingvo's `MultiHeadedAttention` does have, would give 282.183M and 785.766M.
"""

from __future__ import annotations

from dataclasses import dataclass

from .network import Layers, transformer


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Arguments of `transformer`, where they come from, and the parameter count that the source prints, if any."""

    num_layers: int
    width: int = 2048
    num_heads: int = 32
    ff_width: int = 8192
    vocab_size: int = 32_000
    seq_len: int = 1024
    dropout: float = 0.1
    reported_parameters: str | None = None
    source: str

    def layers(self) -> Layers:
        """The named layers."""
        return transformer(
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            ff_width=self.ff_width,
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            dropout=self.dropout,
        )


PRESETS = {
    "tiny": Preset(
        num_layers=4,
        width=128,
        num_heads=4,
        ff_width=512,
        vocab_size=256,
        seq_len=128,
        dropout=0.0,  # a few passes over a small text do not overfit, and torch's fused attention on CPU has no dropout
        source="ours: bytes, trains on two CPU cores in minutes",
    ),
    "282m": Preset(num_layers=3, reported_parameters="282.2M", source="[P] Table 1, Naive-1"),
    "786m": Preset(num_layers=13, reported_parameters="785.8M", source="[P] Table 1, Pipeline-1"),
    "5.3b": Preset(num_layers=103, reported_parameters="5.3B", source="[P] Table 1, Pipeline-8"),
    "21b": Preset(num_layers=415, reported_parameters="21.0B", source="[P] Table 1, Pipeline-32"),
    "83.9b": Preset(num_layers=1663, reported_parameters="83.9B", source="[P] Table 1, Pipeline-128"),
    "48_layers": Preset(
        num_layers=48, source="[P] Tables 2 and 3, Transformer-48; sizes other than 48 layers as in Table 1"
    ),
    "8b": Preset(
        num_layers=156,
        reported_parameters="8B",
        source="[B] 8 billion parameters, 1024 tokens, 16 TPUv3; layers and width are not stated there: as many layers "
        "of Table 1's width as come nearest to 8 billion",
    ),
}
