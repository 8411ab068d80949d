"""Optimizers: the paper's RMSProp, weight decay where it belongs, one-line errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.config import OptimizerConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.training.optimizer import build_optimizer, layer_scales, set_learning_rate


def config(name: str, **settings: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"name": name, "lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "options": {}, **settings})


def test_paper_rmsprop_is_tensorflows_form() -> None:
    lr, decay, momentum, epsilon = 0.64, 0.9, 0.9, 1.0
    weight = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64))
    optimizer = build_optimizer(
        [("weight", weight)], config("rmsproptf", lr=lr, momentum=momentum, options={"alpha": decay, "eps": epsilon})
    )
    expected = weight.detach().clone()
    mean_square, velocity = torch.ones_like(expected), torch.zeros_like(expected)  # the accumulator starts at one
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        gradient = torch.randn(2, 2, generator=generator, dtype=torch.float64) * 10**step
        mean_square = decay * mean_square + (1 - decay) * gradient**2
        rate = lr * 0.5**step  # inside the momentum: a lower rate leaves earlier steps' share as it was
        velocity = momentum * velocity + rate * gradient / torch.sqrt(mean_square + epsilon)
        expected = expected - velocity
        weight.grad = gradient.clone()
        set_learning_rate(optimizer, rate)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_weight_decay_leaves_biases_and_norms_alone() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer = build_optimizer(module.named_parameters(), config("sgd", momentum=0.0, weight_decay=0.5))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in module.named_parameters():
        factor = 1 - 0.1 * 0.5 if name in ("0.weight", "3.weight") else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])


def test_frozen_parameters_are_left_out() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    optimizer = build_optimizer(layer.named_parameters(), config("adamw", weight_decay=0.1))
    assert [parameter for group in optimizer.param_groups for parameter in group["params"]] == [layer.bias]


@pytest.mark.parametrize("name", ["rmsproptf", "sgd", "adamw", "lamb"])
def test_stage_without_parameters_has_an_optimizer_that_does_nothing(name: str) -> None:
    optimizer = build_optimizer(nn.MaxPool2d(2).named_parameters(), config(name))
    set_learning_rate(optimizer, 0.5)
    optimizer.zero_grad()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2).named_parameters(), config("adamw", weight_decay=0.1))
    assert len(optimizer.param_groups) == 2
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_sgd_without_momentum_is_plain_gradient_descent() -> None:
    weight = nn.Parameter(torch.ones(1, 1))
    optimizer = build_optimizer([("weight", weight)], config("sgd", momentum=0.0))
    for _ in range(3):
        weight.grad = torch.ones(1, 1)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[0.7]]))


def test_lamb_does_not_clip_by_the_gradients_of_one_stage() -> None:
    torch.manual_seed(0)
    start = [torch.randn(3, 3), torch.randn(3, 3)]
    gradients = [torch.randn(3, 3), 100 * torch.randn(3, 3)]

    def trained(stages: list[list[int]]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(value.clone()) for value in start]
        for stage in stages:
            optimizer = build_optimizer([(str(i), parameters[i]) for i in stage], config("lamb"))
            for i in stage:
                parameters[i].grad = gradients[i]
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    for one, two in zip(trained([[0, 1]]), trained([[0], [1]]), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "rmsprob"}, r"optimizer.name=rmsprob: unknown; did you mean .*rmsprop"),
        ({"name": "adahessian"}, r"optimizer.name=adahessian: needs second-order gradients"),
        ({"name": "kron"}, r"optimizer.name=kron: keeps state that a checkpoint cannot hold"),
        (
            {"name": "adamw", "options": {"alpha": 0.9}},
            r"optimizer.options.alpha=0.9: adamw has no such option; .*betas",
        ),
        ({"name": "lion", "options": {"eps": 1e-8}}, r"optimizer.options.eps=1e-08: lion has no such option"),
        ({"name": "sgd", "options": {"lr": 1.5}}, r"optimizer.options.lr=1.5: set it as optimizer.lr"),
        (
            {"name": "lamb", "options": {"max_grad_norm": 2.5}},
            r"optimizer.options.max_grad_norm=2.5: set clip_grad_norm",
        ),
        ({"name": "adamw", "options": {"betas": [2.0, 0.9]}}, r"optimizer=adamw: Invalid beta parameter"),
        ({"name": "rmsproptf", "options": {"eps": "tiny"}}, r"optimizer=rmsproptf: "),
    ],
)
def test_what_an_optimizer_cannot_take_is_one_line(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        build_optimizer(nn.Linear(2, 2).named_parameters(), config(**settings))
    assert "\n" not in str(caught.value)


LAYERS = ("stem", "normal_0", "normal_0_end", "aux_head", "normal_1", "classifier")


def test_each_layer_below_the_head_has_a_smaller_share_of_the_rate() -> None:
    scales = layer_scales(LAYERS, 0.5, heads=("aux_head", "classifier"))
    # The halves of a cell count as one, as in the network with whole cells.
    assert scales == {
        "classifier": 1.0, "aux_head": 1.0, "normal_1": 0.5, "normal_0_end": 0.25, "normal_0": 0.25, "stem": 0.125,
    }  # fmt: skip
    whole = layer_scales([name for name in LAYERS if not name.endswith("_end")], 0.5, heads=("aux_head", "classifier"))
    assert whole == {name: scale for name, scale in scales.items() if not name.endswith("_end")}


def test_the_share_of_a_layer_multiplies_every_rate_of_the_schedule() -> None:
    parameters = {
        name: nn.Parameter(torch.ones(shape))
        for name, shape in (("low.weight", (2, 2)), ("low.bias", (2,)), ("head.weight", (2, 2)))
    }
    optimizer = build_optimizer(parameters.items(), config("sgd", momentum=0.0, weight_decay=0.5), {"low": 0.25})
    names = {parameter: name for name, parameter in parameters.items()}

    def rates() -> dict[str, tuple[float, float]]:
        return {
            names[parameter]: (group["lr"], group["weight_decay"])
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    assert rates() == {"low.weight": (0.025, 0.5), "low.bias": (0.025, 0.0), "head.weight": (0.1, 0.5)}
    set_learning_rate(optimizer, 0.8)
    assert rates() == {"low.weight": (0.2, 0.5), "low.bias": (0.2, 0.0), "head.weight": (0.8, 0.5)}
