"""The Transformer's layers: embedding, pre-norm blocks, final norm and softmax projection.

They follow the authors' language model (tensorflow/lingvo, `GPipeTransformerLm` in `tasks/lm/layers.py`, with
`layers_with_attention.py` and `attention.py`): layer norm before each branch, ReLU between two feed-forward matrices
with biases, dropout on attention weights and on what a branch adds. It departs in four points. Attention projections
have no bias. Token vectors are multiplied by the root of the width, so that they start as large as the positions
(Vaswani et al. 2017, section 3.4). Their sum passes the same dropout as the branches (section 5.4 there; lingvo's
default is none). And the matrix that ends a branch starts smaller by sqrt(2 L), which keeps the sum of all branches in
proportion for any depth L (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3).

Shapes: N sequences of T tokens, D the width, H heads, V the vocabulary. Everything runs on meta tensors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..products import Linear

NORM_EPS = 1e-6  # lingvo's LayerNorm
LONGEST_WAVE = 10_000.0  # Vaswani et al. 2017, section 3.5: wavelengths from 2 pi to 10000 * 2 pi tokens


class Embedding(nn.Module):
    """Token ids (N, T) int64 to vectors (N, T, D): the token's vector times sqrt(D), plus its position's, dropped out.

    Initial vectors are normal with standard deviation 1 / sqrt(D) (`GPipeTransformerLm.CommonParams`). Raises
    ValueError for more than `seq_len` tokens, which have no position.
    """

    positions: Tensor

    def __init__(self, vocab_size: int, width: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.scale = math.sqrt(width)
        self.dropout = nn.Dropout(dropout)
        # Not persistent: a checkpoint trained at one length serves at another.
        self.register_buffer("positions", sinusoids(seq_len, width), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        length = token_ids.shape[1]
        if length > len(self.positions):
            raise ValueError(f"a sequence of {length} tokens is longer than seq_len={len(self.positions)}")
        vectors: Tensor = self.dropout(self.tokens(token_ids) * self.scale + self.positions[:length])
        return vectors


class Attention(nn.Module):
    """Causal multi-head self-attention without biases, (N, T, D) to (N, T, D): a token sees itself and earlier ones.

    Xavier-uniform matrices, each projection by itself (lingvo `MultiHeadedAttention`); `output_gain` scales the last.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, output_gain: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query_key_value = Linear(width, 3 * width, bias=False)  # one product instead of three
        self.output = Linear(width, width, bias=False)
        for projection in self.query_key_value.weight.chunk(3):
            nn.init.xavier_uniform_(projection)
        nn.init.xavier_uniform_(self.output.weight, gain=output_gain)

    def forward(self, vectors: Tensor) -> Tensor:
        num_sequences, length, width = vectors.shape
        parts = self.query_key_value(vectors).chunk(3, dim=-1)
        # (N, T, D) each -> (N, H, T, D / H)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(num_sequences, length, width))
        return result


class FeedForward(nn.Module):
    """Two matrices with biases and a ReLU between them, each token by itself: (N, T, D) to (N, T, D)."""

    def __init__(self, width: int, ff_width: int, output_gain: float) -> None:
        super().__init__()
        self.inner = Linear(width, ff_width)
        self.outer = Linear(ff_width, width)
        for linear, gain in ((self.inner, 1.0), (self.outer, output_gain)):
            nn.init.xavier_uniform_(linear.weight, gain=gain)
            nn.init.zeros_(linear.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        result: Tensor = self.outer(F.relu(self.inner(vectors)))
        return result


class Block(nn.Module):
    """One of the L layers of the paper's count: attention, then feed-forward, each added to what it was given.

    (N, T, D) to (N, T, D). `dropout` is the probability for attention weights and for what each branch adds.
    """

    def __init__(self, width: int, num_heads: int, ff_width: int, dropout: float, output_gain: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.attention = Attention(width, num_heads, dropout, output_gain)
        self.feed_forward_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, ff_width, output_gain)
        self.dropout = nn.Dropout(dropout)

    def forward(self, vectors: Tensor) -> Tensor:
        vectors = vectors + self.dropout(self.attention(self.attention_norm(vectors)))
        result: Tensor = vectors + self.dropout(self.feed_forward(self.feed_forward_norm(vectors)))
        return result


class Norm(nn.LayerNorm):
    """Layer norm after the last block, (N, T, D) to (N, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=NORM_EPS)


class Softmax(Linear):
    """The projection to logits, (N, T, D) to (N, T, V), with a bias; the loss normalises them.

    Xavier-uniform weights, the default of lingvo's `SimpleFullSoftmax`.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__(width, vocab_size)
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


def sinusoids(length: int, width: int) -> Tensor:
    """Position vectors (length, width): sines in the first half, cosines in the second (Vaswani et al. 2017, 3.5).

    The order of sines and cosines is lingvo's (`PositionalEmbeddingLayer`); the paper cited interleaves them.
    """
    num_waves = width // 2
    frequencies = LONGEST_WAVE ** (-torch.arange(num_waves, dtype=torch.float64) / max(1, num_waves - 1))
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(torch.get_default_dtype())
