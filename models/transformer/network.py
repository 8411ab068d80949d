"""The paper's language model (section 3, "Transformer-L") as a sequence of named layers.

Embedding, final norm and softmax projection are layers of their own, so that the cut can give them a partition each:
with a large vocabulary the projection costs as much as several blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from .layers import Block, Embedding, Norm, Softmax

Layers = list[tuple[str, Callable[[], nn.Module]]]

# Full names of the one matrix that a tied softmax shares with the embedding: the engine's `ties=`.
TIED_SOFTMAX = (("embedding.tokens.weight", "softmax.weight"),)


def transformer(
    *,
    num_layers: int,
    width: int,
    num_heads: int,
    ff_width: int,
    vocab_size: int,
    seq_len: int,
    dropout: float = 0.1,
) -> Layers:
    """The layers of a causal language model with `num_layers` blocks: (name, factory).

    Token ids (N, T) int64 with T of at most `seq_len` in, logits (N, T, vocab_size) out; the logits at a token predict
    the next one. `dropout` is one probability for embeddings, attention weights and residual branches. All blocks have
    the same factory object, so whoever costs or counts layers need look at one of them only.

    The softmax projection has weights of its own, as in the paper; pass TIED_SOFTMAX to the engine to share the
    embedding's.

    Raises ValueError for arguments out of range, naming all of them and what is allowed.
    """
    _check(num_layers, width, num_heads, ff_width, vocab_size, seq_len, dropout)
    output_gain = (2 * num_layers) ** -0.5  # two branches a block are added up
    block = partial(Block, width, num_heads, ff_width, dropout, output_gain)
    return [
        ("embedding", partial(Embedding, vocab_size, width, seq_len, dropout)),
        *((f"block_{index}", block) for index in range(num_layers)),
        ("norm", partial(Norm, width)),
        ("softmax", partial(Softmax, width, vocab_size)),
    ]


def _check(
    num_layers: int, width: int, num_heads: int, ff_width: int, vocab_size: int, seq_len: int, dropout: float
) -> None:
    counts = {
        "num_layers": num_layers,
        "num_heads": num_heads,
        "ff_width": ff_width,
        "vocab_size": vocab_size,
        "seq_len": seq_len,
    }
    problems = [f"{name}={value}: expected 1 or more" for name, value in counts.items() if value < 1]
    if width < 2 or width % 2:
        problems.append(f"width={width}: expected an even number, half of it are sines and half cosines")
    elif num_heads >= 1 and width % num_heads:
        problems.append(f"num_heads={num_heads}: expected a divisor of width={width}")
    if not 0.0 <= dropout < 1.0:
        problems.append(f"dropout={dropout}: expected a probability of at least 0 and below 1")
    if problems:
        raise ValueError("; ".join(problems))
