from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpipe_cli.models.transformer.network import TIED_SOFTMAX, transformer
from torch import nn

from gpipe_cli.pipeline import Pipeline
from gpipe_cli.pipeline.profile import count_costs

SMALL: dict[str, Any] = {
    "num_layers": 3, "width": 16, "num_heads": 2, "ff_width": 24, "vocab_size": 11, "seq_len": 8, "dropout": 0.0,
}  # fmt: skip


def small_network(**changes: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((name, factory()) for name, factory in transformer(**{**SMALL, **changes})))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(num_sequences: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (num_sequences, 9), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def test_layers_have_the_names_that_the_cut_can_separate() -> None:
    assert [name for name, _ in transformer(**SMALL)] == [
        "embedding", "block_0", "block_1", "block_2", "norm", "softmax",
    ]  # fmt: skip


def test_token_ids_become_logits_also_for_shorter_sequences() -> None:
    network = small_network()
    assert network(torch.zeros(2, 8, dtype=torch.int64)).shape == (2, 8, 11)
    assert network(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 11)


@pytest.mark.parametrize("place", range(1, 8))
def test_a_later_token_never_changes_an_earlier_logit(place: int) -> None:
    network = small_network().double().eval()
    inputs = batch(1)[0]
    changed = inputs.clone()
    changed[0, place] = (changed[0, place] + 1) % 11
    before, after = network(inputs), network(changed)
    torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-14)
    assert (after[:, place] - before[:, place]).abs().max() > 1e-3


def test_an_earlier_token_changes_all_later_logits() -> None:
    network = small_network().double().eval()
    inputs = batch(1)[0]
    changed = inputs.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 11
    difference = (network(changed) - network(inputs)).abs().amax(dim=2)
    assert (difference > 1e-6).all()


@pytest.mark.parametrize(
    ("num_partitions", "num_micro_batches", "remat"), [(1, 2, "none"), (3, 5, "full"), (4, 3, "full")]
)
def test_pipelined_gradients_equal_the_plain_networks(num_partitions: int, num_micro_batches: int, remat: str) -> None:
    plain = small_network().double()
    inputs, targets = batch()
    loss = token_loss(plain(inputs), targets)
    loss.backward()
    pipe = Pipeline(small_network().double(), num_partitions, num_micro_batches, loss_fn=token_loss, remat=remat)
    result = pipe.forward_backward(inputs, targets)
    assert float(result.loss) == pytest.approx(float(loss.detach()), abs=1e-12)
    expected = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=1e-12)


def test_dropout_masks_depend_neither_on_the_cut_nor_on_recomputation() -> None:
    inputs, targets = batch()
    layers = transformer(**{**SMALL, "dropout": 0.2})
    losses, gradients = [], []
    for num_partitions, remat in ((1, "none"), (3, "full"), (6, "except_last")):
        pipe = Pipeline(layers, num_partitions, 2, loss_fn=token_loss, remat=remat, seed=3)
        losses.append(float(pipe.forward_backward(inputs, targets).loss))
        gradients.append({name: parameter.grad for name, parameter in pipe.named_parameters()})
    assert losses[0] == losses[1] == losses[2]
    for other in gradients[1:]:
        assert all(torch.equal(gradients[0][name], gradient) for name, gradient in other.items())


def test_tied_softmax_is_one_matrix_with_the_sum_of_both_gradients() -> None:
    inputs, targets = batch()
    layers = transformer(**SMALL)
    pipe = Pipeline(layers, 2, 2, loss_fn=token_loss, ties=TIED_SOFTMAX)
    pipe.module.double()
    plain = small_network().double()
    plain.load_state_dict(pipe.state_dict())
    plain.softmax.weight = plain.embedding.tokens.weight
    token_loss(plain(inputs), targets).backward()
    pipe.forward_backward(inputs, targets)
    found = dict(pipe.named_parameters())
    torch.testing.assert_close(found["softmax.weight"].grad, plain.softmax.weight.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["embedding.tokens.weight"].grad, plain.softmax.weight.grad, rtol=0, atol=1e-12)
    untied = Pipeline(layers, 2, 2, loss_fn=token_loss)
    assert untied.num_parameters - pipe.num_parameters == 11 * 16


def test_all_blocks_have_the_same_factory_and_are_still_initialised_differently() -> None:
    layers = transformer(**SMALL)
    assert len({factory for name, factory in layers if name.startswith("block")}) == 1
    pipe = Pipeline(layers, 1, 1, loss_fn=token_loss, seed=1)
    state = pipe.state_dict()
    assert not torch.equal(state["block_0.attention.output.weight"], state["block_1.attention.output.weight"])


def test_deep_networks_start_with_outputs_of_the_same_size() -> None:
    inputs = batch()[0]
    sizes = []
    for num_layers in (2, 32):
        network = small_network(num_layers=num_layers, width=64, ff_width=128)
        with torch.no_grad():
            sizes.append(float(network[:-2](inputs).std()))
    assert sizes[1] < 1.5 * sizes[0]


def test_costs_on_meta_are_the_operations_of_the_matrices() -> None:
    layers = transformer(**SMALL)
    costs = count_costs(layers, torch.empty(2, 8, dtype=torch.int64, device="meta"))
    tokens = 2 * 8
    # Two operations for each weight and token, and for the scores and their mixture over all 8 x 8 pairs.
    block = 2 * tokens * (4 * 16 * 16 + 2 * 16 * 24) + 2 * 2 * tokens * 8 * 16
    assert [cost.num_flops for cost in costs] == [0, block, block, block, 0, 2 * tokens * 16 * 11]


def test_checkpoints_hold_parameters_only() -> None:
    network = small_network()
    assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: expected 1 or more"),
        ({"width": 15}, "width=15: expected an even number"),
        ({"num_heads": 3}, "num_heads=3: expected a divisor of width=16"),
        ({"vocab_size": 0, "seq_len": 0}, "vocab_size=0: expected 1 or more; seq_len=0: expected 1 or more"),
        ({"dropout": 1.0}, "dropout=1.0: expected a probability"),
    ],
)
def test_arguments_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformer(**{**SMALL, **changes})
