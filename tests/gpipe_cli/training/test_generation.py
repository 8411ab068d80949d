from __future__ import annotations

import math

import pytest
import torch
from gpipe_cli.models.transformer.presets import PRESETS
from torch import Tensor

from gpipe_cli.pipeline import Pipeline
from gpipe_cli.training.generation import continue_tokens
from gpipe_cli.training.language_loss import build_language_loss


def successor(tokens: Tensor) -> Tensor:
    """A model that is nearly sure that the next token is the last one plus one, modulo 5."""
    return 4.0 * torch.nn.functional.one_hot((tokens + 1) % 5, 5).double()


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert list(continue_tokens(successor, [3], 6, seq_len=4, temperature=0.0)) == [4, 0, 1, 2, 3, 4]


def test_of_equal_logits_the_lowest_token_wins() -> None:
    def flat(tokens: Tensor) -> Tensor:
        return torch.zeros(1, tokens.shape[1], 5)

    assert list(continue_tokens(flat, [3], 2, seq_len=4, temperature=0.0)) == [0, 0]


def test_draws_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    def flat(tokens: Tensor) -> Tensor:
        return torch.zeros(1, tokens.shape[1], 256)

    before = torch.get_rng_state()
    texts = [list(continue_tokens(flat, [0], 20, seq_len=4, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax_of_the_logits_over_the_temperature(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])

    def model(tokens: Tensor) -> Tensor:
        return logits.expand(1, tokens.shape[1], 3)

    drawn = torch.tensor(list(continue_tokens(model, [0], 3000, seq_len=2, temperature=temperature)))
    expected = torch.softmax(logits / temperature, 0)
    torch.testing.assert_close(torch.bincount(drawn, minlength=3) / 3000, expected, rtol=0, atol=0.03)


def test_the_model_sees_the_last_tokens_that_have_a_position() -> None:
    seen = []

    def model(tokens: Tensor) -> Tensor:
        seen.append(tokens.tolist())
        return successor(tokens)

    list(continue_tokens(model, [0, 1], 3, seq_len=3, temperature=0.0))
    assert seen == [[[0, 1]], [[0, 1, 2]], [[1, 2, 3]]]


def test_a_pipeline_writes_the_same_text_for_every_number_of_partitions() -> None:
    texts = []
    for num_partitions in (1, 3):
        pipe = Pipeline(PRESETS["tiny"].layers(), num_partitions, 2, loss_fn=build_language_loss())
        texts.append(list(continue_tokens(pipe.evaluate, b"The ", 8, seq_len=128)))  # type: ignore[arg-type]
    assert texts[0] == texts[1]


def test_what_cannot_be_continued_is_named() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        next(continue_tokens(successor, [], 1, seq_len=4))
    with pytest.raises(ValueError, match=r"temperature=-1.0: expected 0 .* or more"):
        next(continue_tokens(successor, [0], 1, seq_len=4, temperature=-1.0))
    with pytest.raises(ValueError, match="logits of token 1 are not finite"):
        next(continue_tokens(lambda tokens: successor(tokens) * math.nan, [0], 1, seq_len=4))
