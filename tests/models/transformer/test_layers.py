from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from gpipe_cli.models.transformer.layers import Attention, Block, Embedding, FeedForward, Norm, Softmax, sinusoids
from torch import Tensor, nn


def normalised(vectors: Tensor, norm: nn.LayerNorm) -> Tensor:
    mean = vectors.mean(dim=-1, keepdim=True)
    variance = ((vectors - mean) ** 2).mean(dim=-1, keepdim=True)
    return (vectors - mean) / (variance + 1e-6).sqrt() * norm.weight + norm.bias


def attended(vectors: Tensor, attention: Attention) -> Tensor:
    """Softmax attention sequence by sequence, head by head, token by token."""
    width = vectors.shape[2]
    size = width // attention.num_heads
    query_matrix, key_matrix, value_matrix = attention.query_key_value.weight.chunk(3)
    result = torch.zeros_like(vectors)
    for number, sequence in enumerate(vectors):
        for head in range(attention.num_heads):
            own = slice(head * size, (head + 1) * size)
            query, key, value = (sequence @ matrix[own].T for matrix in (query_matrix, key_matrix, value_matrix))
            for place in range(len(sequence)):
                scores = torch.stack([query[place] @ key[earlier] / math.sqrt(size) for earlier in range(place + 1)])
                weights = scores.exp() / scores.exp().sum()
                result[number, place, own] = weights @ value[: place + 1]
    return result @ attention.output.weight.T


def fed_forward(vectors: Tensor, network: FeedForward) -> Tensor:
    hidden = (vectors @ network.inner.weight.T + network.inner.bias).clamp(min=0)
    return hidden @ network.outer.weight.T + network.outer.bias


def scrambled(module: nn.Module) -> nn.Module:
    """Weights without structure, biases and norms too, in float64."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.double().parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.3
    return module.eval()


@pytest.fixture
def vectors() -> Tensor:
    return torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_attention_is_the_plain_causal_softmax(vectors: Tensor) -> None:
    attention = scrambled(Attention(12, num_heads=3, dropout=0.0, output_gain=1.0))
    assert isinstance(attention, Attention)
    torch.testing.assert_close(attention(vectors), attended(vectors, attention), rtol=1e-12, atol=1e-12)


def test_block_adds_attention_and_feed_forward_to_its_unnormalised_input(vectors: Tensor) -> None:
    block = scrambled(Block(12, num_heads=3, ff_width=20, dropout=0.1, output_gain=1.0))
    assert isinstance(block, Block)
    middle = vectors + attended(normalised(vectors, block.attention_norm), block.attention)
    expected = middle + fed_forward(normalised(middle, block.feed_forward_norm), block.feed_forward)
    torch.testing.assert_close(block(vectors), expected, rtol=1e-12, atol=1e-12)


def test_embedding_is_the_scaled_token_plus_sines_and_cosines() -> None:
    embedding = Embedding(vocab_size=5, width=4, seq_len=3, dropout=0.0).double()
    found = embedding(torch.tensor([[2, 0, 2]]))
    for place, token in enumerate([2, 0, 2]):
        angles = [place * 1.0, place * 1e-4]
        position = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)
        expected = 2.0 * embedding.tokens.weight[token] + position
        torch.testing.assert_close(found[0, place], expected, rtol=0, atol=1e-6)


def test_every_position_is_different_and_near_ones_are_alike() -> None:
    positions = sinusoids(256, 32)
    distances = torch.cdist(positions, positions)
    assert distances.fill_diagonal_(1.0).min() > 0.1
    assert distances[0, 1] < distances[0, 8] < distances[0, 64]


def test_a_sequence_without_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 9 tokens is longer than seq_len=8"):
        Embedding(4, 4, seq_len=8, dropout=0.0)(torch.zeros(1, 9, dtype=torch.int64))


def test_norm_and_softmax_are_layer_norm_and_a_projection_with_bias(vectors: Tensor) -> None:
    norm, softmax = scrambled(Norm(12)), scrambled(Softmax(12, 9))
    assert isinstance(norm, Norm)
    torch.testing.assert_close(norm(vectors), normalised(vectors, norm))
    torch.testing.assert_close(softmax(vectors), vectors @ softmax.weight.T + softmax.bias)  # type: ignore[union-attr]


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_a_branch_drops_that_share_of_what_it_adds_and_keeps_the_mean(dropout: float) -> None:
    torch.manual_seed(0)
    block = Block(8, num_heads=1, ff_width=8, dropout=dropout, output_gain=1.0).train()
    nn.init.zeros_(block.attention.output.weight)  # only the feed-forward branch adds anything: a constant
    nn.init.zeros_(block.feed_forward.outer.weight)
    nn.init.ones_(block.feed_forward.outer.bias)
    added = block(torch.zeros(50, 40, 8))
    assert (added == 0).float().mean().item() == pytest.approx(dropout, abs=0.02)
    assert added.mean().item() == pytest.approx(1.0, abs=0.03)
    assert torch.equal(block.eval()(torch.zeros(1, 3, 8)), torch.ones(1, 3, 8))


def test_attention_weights_are_dropped_in_training_only() -> None:
    torch.manual_seed(0)
    attention = Attention(4, num_heads=1, dropout=0.25, output_gain=1.0).train()
    nn.init.zeros_(attention.query_key_value.weight)
    attention.query_key_value.weight.data[8:] = torch.eye(4)  # uniform attention over the values themselves
    attention.output.weight.data = torch.eye(4)
    first_tokens = attention(torch.ones(4000, 1, 4))  # a token alone: its one weight is 0 or 1 / (1 - p)
    assert first_tokens.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (first_tokens == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(attention.eval()(torch.ones(3, 5, 4)), torch.ones(3, 5, 4))


def test_embeddings_are_dropped_too() -> None:
    torch.manual_seed(0)
    embedding = Embedding(4, 16, seq_len=32, dropout=0.3).train()
    vectors = embedding(torch.randint(4, (40, 32)))
    assert (vectors == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)


def test_initial_weights_have_the_documented_size() -> None:
    torch.manual_seed(0)
    embedding, block = Embedding(500, 64, 8, 0.0), Block(64, 4, 256, 0.0, output_gain=0.25)
    assert embedding.tokens.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    xavier = math.sqrt(6 / 128)
    largest = [part.abs().max().item() for part in block.attention.query_key_value.weight.chunk(3)]
    assert largest == pytest.approx([xavier] * 3, rel=0.01)
    assert block.attention.output.weight.abs().max().item() == pytest.approx(0.25 * xavier, rel=0.01)
    assert block.feed_forward.outer.weight.abs().max().item() == pytest.approx(0.25 * math.sqrt(6 / 320), rel=0.01)
    assert not block.feed_forward.inner.bias.any()


def test_attention_uses_torchs_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    genuine = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (calls.append(k), genuine(*a, **k))[1])
    Attention(8, 2, dropout=0.1, output_gain=1.0).eval()(torch.zeros(1, 3, 8))
    assert calls == [{"dropout_p": 0.0, "is_causal": True}]


def graph_nodes(root: object) -> set[str]:
    """Names of all the operations of a backward pass."""
    seen, names, waiting = set(), set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            waiting.extend(later for later, _ in node.next_functions)
    return names


def test_no_backward_pass_through_a_block_copies_what_was_overwritten_in_a_view():
    """An operation in place on what a linear layer returns, a view, made a training step an eighth longer."""
    block = Block(width=8, num_heads=2, ff_width=16, dropout=0.1, output_gain=1.0)
    names = graph_nodes(block(torch.randn(2, 3, 8, requires_grad=True)).grad_fn)
    assert any("Relu" in name for name in names)
    assert not [name for name in names if "CopySlices" in name]
