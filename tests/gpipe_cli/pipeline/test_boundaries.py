"""What crosses a stage boundary: tuples, missing gradients, layouts, dtypes, shapes that change, in-place layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.pipeline import Pipeline


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    del targets
    return outputs.mean()


def weight(value: Any) -> nn.Linear:
    values = torch.as_tensor(value, dtype=torch.float64)
    layer = nn.Linear(values.shape[-1], values.shape[0], bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(values)
    return layer


class Call(nn.Module):
    """A function as a layer, with modules it may use."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, value: Any) -> Any:
        return self.function(value, **dict(self.named_children()))


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_output_that_nobody_uses_has_no_gradient_and_nothing_hangs(step, micro_batches, remat, ranks):
    def make() -> nn.Sequential:
        two = Call(lambda x, a, b: (a(x), b(x)), a=weight([[2.0]]), b=weight([[5.0]]))
        return nn.Sequential(two, Call(lambda t, c: c(t[0]), c=weight([[3.0]])))

    x = torch.arange(1.0, 5.0, dtype=torch.float64).view(4, 1)
    report = step(make, x, x, mean, partitions=2, micro_batches=micro_batches, remat=remat, ranks=ranks)
    assert report["losses"] == [15.0]
    assert report["gradients"]["0.a.weight"].item() == 7.5
    assert report["gradients"]["1.c.weight"].item() == 5.0
    assert report["without_gradient"] == ["0.b.weight"]


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("balance", [[1, 2], None])
def test_an_in_place_layer_may_come_first_in_a_stage(step, plain, assert_same, remat, balance):
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)).double()

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for partitions, micro_batches in ((2, 1), (2, 3)):
        report = step(
            make, x, x, mean, partitions=partitions, micro_batches=micro_batches, remat=remat, balance=balance, steps=2
        )
        assert_same(report, plain(make, x, x, mean, steps=2), 1e-12)


class AddOneInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_recomputation_starts_from_inputs_that_an_in_place_layer_has_not_spoilt(step, partitions):
    def make() -> nn.Sequential:
        return nn.Sequential(AddOneInPlace(), weight([[2.0]]), AddOneInPlace())

    x = torch.zeros(4, 1, dtype=torch.float64)
    report = step(make, x, x, mean, partitions=partitions, micro_batches=4, steps=3, remat="full")
    assert report["gradients"]["1.weight"].item() == 1.0
    assert report["losses"] == [3.0, 3.0, 3.0]
    assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_output_that_is_not_contiguous_crosses(step, micro_batches):
    def make() -> nn.Sequential:
        return nn.Sequential(weight(torch.eye(3)), Call(lambda x: x.transpose(1, 2)), weight([[1.0, 10.0]]))

    x = torch.arange(1.0, 25.0, dtype=torch.float64).view(4, 2, 3)
    loss_fn = lambda outputs, targets: outputs.flatten(1).sum(1).mean() / 3  # noqa: E731
    report = step(make, x, x, loss_fn, partitions=2, balance=[2, 1], micro_batches=micro_batches, steps=2)
    assert report["losses"] == [151.0, 151.0]
    assert report["gradients"]["2.weight"].tolist() == [[11.0, 14.0]]


def test_channels_last_and_gaps_survive_the_boundary(run_ranks):
    def run() -> dict[str, Any]:
        seen: list[tuple[int, ...]] = []
        look = Call(
            lambda t: (seen.append(t[0].stride()), seen.append(t[1].stride()), t[0].sum((1, 2, 3)) + t[1].sum(1))[2]
        )
        make = Call(lambda x: (x * 2, x[:, ::2, 0, 0]))
        pipe = Pipeline(nn.Sequential(make, look), 2, 2, loss_fn=mean, balance=[1, 1])
        x = torch.randn(4, 6, 5, 3).contiguous(memory_format=torch.channels_last)
        for _ in range(2):
            pipe.forward_backward(x, x)
        return {"strides": [list(s) for s in seen]}

    _, last = run_ranks(2, run)
    assert last["strides"][0::2] == [[90, 1, 18, 6]] * len(last["strides"][0::2])
    assert set(map(tuple, last["strides"][1::2])) == {(3, 1)}


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float64)


def test_any_dtype_and_many_tensors_cross_together_with_scalars_per_sample(step):
    def spread(x: Tensor) -> tuple[Tensor, ...]:
        return tuple((x * 3).to(dtype) if dtype is not torch.bool else x > 0 for dtype in DTYPES) * 5 + (x,)

    def gather(values: tuple[Tensor, ...]) -> Tensor:
        assert [v.dtype for v in values[: len(DTYPES)]] == list(DTYPES)
        return sum((v.double() for v in values), torch.zeros(()))

    def make() -> nn.Sequential:
        return nn.Sequential(weight([[1.0]]), Call(spread), Call(gather))

    x = torch.arange(1.0, 5.0, dtype=torch.float64).view(4, 1)
    one = step(make, x, x, mean, partitions=1, micro_batches=2, steps=2)
    two = step(make, x, x, mean, partitions=2, balance=[2, 1], micro_batches=2, steps=2)
    assert one["losses"] == two["losses"] == [5 * (1 + 6 * 7.5) + 2.5] * 2
    assert torch.equal(one["gradients"]["0.weight"], two["gradients"]["0.weight"])


BATCHES = ((4, 8, 8), (4, 6, 10), (6, 8, 8), (4, 8, 8), (3, 8, 8), (4, 8, 8))


def shapes_in_turn(partitions: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 1)
    ).double()
    reference = copy.deepcopy(model)
    pipe = Pipeline(model, partitions, 2, loss_fn=mean)
    differences = []
    for samples, height, width in BATCHES:
        x = torch.randn(samples, 3, height, width, dtype=torch.float64)
        pipe.module.zero_grad()
        reference.zero_grad()
        loss = pipe.forward_backward(x, x).loss
        expected = reference(x).mean()
        expected.backward()
        differences.append(abs(float(loss) - float(expected.detach())))
        gradients = dict(reference.named_parameters())
        differences += [float((p.grad - gradients[n].grad).abs().max()) for n, p in pipe.named_parameters()]
        pipe.evaluate(x[:1])
    return {"largest": max(differences)}


@pytest.mark.parametrize("partitions", [1, 2])
def test_shapes_may_change_from_batch_to_batch(run_ranks, partitions):
    assert all(report["largest"] < 1e-12 for report in run_ranks(partitions, shapes_in_turn, partitions))


def dtypes_under_autocast() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[str] = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: seen.append(str(output.dtype)))
    pipe = Pipeline(model, 2, 2, loss_fn=mean, autocast=torch.bfloat16)
    x = torch.randn(4, 4)
    result = pipe.forward_backward(x, x)
    return {
        "seen": sorted(set(seen)),
        "parameters": sorted(
            {str(p.dtype) for p in pipe.parameters()} | {str(p.grad.dtype) for p in pipe.parameters()}
        ),
        "loss": float(result.loss),
    }


def test_mixed_precision_works_in_every_stage_and_leaves_parameters_alone(run_ranks):
    reports = run_ranks(1, dtypes_under_autocast) + run_ranks(2, dtypes_under_autocast)
    for report in reports:
        assert report["seen"] == ["torch.bfloat16"]
        assert report["parameters"] == ["torch.float32"]
        assert report["loss"] == pytest.approx(reports[0]["loss"], abs=1e-2)


def test_stages_without_parameters_train(step, plain, assert_same):
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 4), nn.AvgPool1d(2)).double()

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for balance in ([1, 2, 2], [3, 1, 1]):
        report = step(make, x, x, mean, partitions=3, balance=balance, micro_batches=2, lr=0.1, steps=2)
        assert_same(report, plain(make, x, x, mean, lr=0.1, steps=2), 1e-12)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_frozen_layers_get_no_gradient_and_pass_none_on(step, remat):
    def make() -> nn.Sequential:
        model = nn.Sequential(weight([[2.0]]), weight([[3.0]]), weight([[4.0]]))
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        return model

    x = torch.ones(4, 1, dtype=torch.float64)
    for partitions in (1, 3):
        report = step(make, x, x, mean, partitions=partitions, micro_batches=2, remat=remat)
        assert report["losses"] == [24.0]
        assert report["gradients"]["2.weight"].item() == 6.0
        assert report["without_gradient"] == ["0.weight", "1.weight"]
        # Only where something is trained is anything recomputed: the first of two micro-batches, in the last stage.
        assert report["num_rematerializations"] == (1 if remat == "full" else 0)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_a_frozen_stage_passes_on_the_gradient_of_what_is_trained_before_it(step, remat):
    def make() -> nn.Sequential:
        model = nn.Sequential(weight([[2.0]]), weight([[3.0]]), weight([[4.0]]))
        model[1].requires_grad_(False)
        return model

    x = torch.ones(4, 1, dtype=torch.float64)
    report = step(make, x, x, mean, partitions=3, micro_batches=2, remat=remat)
    assert {name: gradient.item() for name, gradient in report["gradients"].items()} == {"0.weight": 12, "2.weight": 6}
    assert report["without_gradient"] == ["1.weight"]


def test_a_layer_that_returns_something_else_is_named():
    pipe = Pipeline(nn.Sequential(nn.Identity(), Call(lambda x: [x])), loss_fn=mean)
    with pytest.raises(TypeError, match="layer '1' gives list of Tensor: between layers a tensor or a tuple"):
        pipe.forward_backward(torch.ones(2, 1), torch.ones(2, 1))
