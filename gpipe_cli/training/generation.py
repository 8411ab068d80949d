"""Writing on: token after token from a language model that is given as a function, so any pipeline can be behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# Token ids (1, T) int64 -> logits (1, T, V). With a pipeline over several ranks the function runs it on all of them
# and returns the last rank's logits on each, so that every rank draws the same token.
Evaluate = Callable[[Tensor], Tensor]


def continue_tokens(
    evaluate: Evaluate,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    seq_len: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """`num_tokens` token ids that follow the prompt, each as soon as it is known.

    The model sees the last `seq_len` tokens. `temperature` 0 takes the likeliest token (of equals the lowest id), 1
    draws from the model's distribution, in between sharpens it. The draws are a function of `seed` alone, and made in
    float64 on the CPU, so that equal logits give equal text on every device.

    Raises ValueError for an empty prompt, a negative temperature and logits that are not finite.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token to go on from")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: expected 0 (the likeliest token) or more")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        seen = torch.tensor([tokens[-seq_len:]], dtype=torch.int64)
        logits = evaluate(seen)[0, -1].detach().to("cpu", torch.float64)
        if not bool(logits.isfinite().all()):
            raise ValueError(f"the logits of token {len(tokens)} are not finite: the weights are of no use")
        tokens.append(_choose(logits, temperature, generator))
        yield tokens[-1]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int((logits == logits.max()).nonzero()[0])
    probabilities = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
