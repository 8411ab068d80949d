"""The network as a sequence of layers: parameter counts, shapes, gradients, heads."""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch
from gpipe_cli.models.amoebanet.cell import DropPath
from gpipe_cli.models.amoebanet.network import AuxHead, Classifier, amoebanet
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_cli.pipeline.profile import count_costs


def build(**arguments: Any) -> nn.Sequential:
    settings = {"num_layers": 3, "num_filters": 8, "num_classes": 5, "stem": "small"} | arguments
    network = nn.Sequential()
    for name, factory in amoebanet(**settings):
        network.add_module(name, factory())
    return network


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("variant", "num_layers", "num_filters", "expected"),
    [
        ("B", 18, 512, 557_333_736),
        ("D", 18, 208, 81_139_629),
        ("D", 18, 416, 317_564_584),
        ("D", 18, 544, 540_240_600),
        ("D", 36, 544, 1_053_338_136),
        ("D", 72, 512, 1_842_648_616),
        ("D", 18, 256, 121_916_424),
    ],
)
def test_parameter_count_is_the_papers(variant: str, num_layers: int, num_filters: int, expected: int) -> None:
    with torch.device("meta"):
        network = build(
            variant=variant, num_layers=num_layers, num_filters=num_filters, num_classes=1000, stem="imagenet"
        )
    assert num_parameters(network) == expected


@pytest.mark.parametrize("size", [8, 9, 32, 33, 64, 224, 331])
@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("variant", ["B", "D"])
def test_any_input_size_gives_logits(variant: str, stem: str, size: int) -> None:
    with torch.device("meta"):
        network = build(variant=variant, stem=stem, aux_head=True, image_size=size)
        images = torch.zeros(2, 3, size, size)
        logits, aux_logits = network(images)
        assert logits.shape == aux_logits.shape == (2, 5)
        assert network.eval()(images[:, :, : size - 1]).shape == (2, 5)  # and a picture that is not square


@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("variant", ["B", "D"])
def test_maps_shrink_with_every_reduction_as_tensorflows_same_padding_says(variant: str, stem: str) -> None:
    with torch.device("meta"):
        network = build(variant=variant, stem=stem, num_layers=6, num_filters=16)
        value: Any = torch.zeros(1, 3, 331, 331)
        size = 0
        for name, layer in network.named_children():
            value = layer(value)
            if name == "stem":
                size = 165 if stem == "imagenet" else 331
                assert value.shape == (1, 4 if stem == "imagenet" else 16, size, size)
            elif name != "classifier":
                size = math.ceil(size / 2) if "reduction" in name or "stem_cell" in name else size
                assert value[1].shape[2:] == (size, size)


def test_network_builds_and_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        network = build(stem="imagenet")
        logits = network(torch.empty(2, 3, 64, 64).to(memory_format=torch.channels_last))
        logits.sum().backward()
    assert logits.shape == (2, 5)


def test_layers_are_named_in_the_order_of_the_reference() -> None:
    names = [name for name, _ in amoebanet(num_layers=6, num_filters=64, aux_head=True, image_size=224)]
    assert names == [
        *("stem", "stem_cell_0", "stem_cell_1", "normal_0", "normal_1", "reduction_0", "normal_2", "normal_3"),
        *("aux_head", "reduction_1", "normal_4", "normal_5", "classifier"),
    ]
    assert len(amoebanet(num_layers=6, num_filters=64)) == 12


@pytest.mark.parametrize(("num_layers", "before"), [(2, (0, 1)), (4, (1, 2)), (5, (1, 3)), (7, (2, 4)), (18, (6, 12))])
def test_reductions_stand_before_a_third_and_two_thirds(num_layers: int, before: tuple[int, int]) -> None:
    names = [name for name, _ in amoebanet(num_layers=num_layers, num_filters=8)]
    for index, layer in enumerate(before):
        assert names[names.index(f"normal_{layer}") - 1] == f"reduction_{index}"


@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("variant", ["B", "D"])
def test_every_parameter_receives_a_gradient(variant: str, stem: str) -> None:
    torch.manual_seed(0)
    network = build(variant=variant, stem=stem, num_filters=16, aux_head=True, image_size=32)
    logits, aux_logits = network(torch.randn(4, 3, 32, 32))
    (logits.square().sum() + aux_logits.square().sum()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_whole_network_equals_its_definition(references: ModuleType) -> None:
    torch.manual_seed(0)
    network = build(num_layers=2, num_filters=8, stem="imagenet").double()
    images = torch.randn(2, 3, 17, 17, dtype=torch.float64)
    stem = network.get_submodule("stem")
    previous = current = references.norm(
        references.conv(images, stem.conv.weight, (2, 2), same=False), stem.norm
    )  # no ReLU on the image
    for name, layer in network.named_children():
        if name not in ("stem", "classifier"):
            reduces = not name.startswith("normal")
            previous, current = current, references.cell(layer, previous, current, reduces)
    linear = network.get_submodule("classifier.linear")
    features = references.relu(current).sum(dim=(2, 3)) / (current.shape[2] * current.shape[3])
    expected = features @ linear.weight.T + linear.bias
    actual = network(images)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)
    grads = torch.autograd.grad(actual.square().sum(), list(network.parameters()))
    expected_grads = torch.autograd.grad(expected.square().sum(), list(network.parameters()))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_network_cut_at_a_layer_has_the_gradients_of_the_whole(cut: int) -> None:
    torch.manual_seed(0)
    network = build(aux_head=True, image_size=9).double()
    images = torch.randn(3, 3, 9, 9, dtype=torch.float64)

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return outputs[0].square().mean() + 0.4 * outputs[1].square().mean()

    expected = torch.autograd.grad(loss(network(images)), list(network.parameters()))
    boundary = network[:cut](images)
    sent = boundary if isinstance(boundary, tuple) else (boundary,)
    received = tuple(tensor.detach().requires_grad_() for tensor in sent)
    loss(network[cut:](received if isinstance(boundary, tuple) else received[0])).backward()
    torch.autograd.backward(sent, [tensor.grad for tensor in received])
    for parameter, expected_grad in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_gradient_agrees_with_finite_differences() -> None:
    torch.manual_seed(0)
    network = build(variant="B", num_layers=2).double()
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(images)
    loss = network(images).square().sum()
    (grad,) = torch.autograd.grad(loss, images)
    step = 1e-6
    with torch.no_grad():
        ahead, behind = (network(images + sign * step * direction).square().sum() for sign in (1, -1))
    assert ((ahead - behind) / (2 * step)).item() == pytest.approx((grad * direction).sum().item(), rel=1e-5)


def test_channels_last_gives_the_same_numbers_and_stays_channels_last() -> None:
    torch.manual_seed(0)
    network = build(stem="imagenet").double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = network(images)
    network.to(memory_format=torch.channels_last)
    value: Any = images.to(memory_format=torch.channels_last)
    for name, layer in network.named_children():
        value = layer(value)
        for tensor in value if isinstance(value, tuple) else (value,):
            assert tensor.dim() == 2 or tensor.is_contiguous(memory_format=torch.channels_last), name
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


def test_evaluation_is_deterministic_and_draws_nothing() -> None:
    torch.manual_seed(0)
    network = build(dropout=0.5, drop_path=0.5, aux_head=True, image_size=16)
    images = torch.randn(2, 3, 16, 16)
    assert not torch.equal(network(images)[0], network(images)[0])
    network.eval()
    state = torch.get_rng_state()
    first = network(images)
    assert isinstance(first, Tensor)
    assert torch.equal(first, network(images))
    torch.testing.assert_close(first[:1], network(images[:1]))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_drop_training_draws_nothing() -> None:
    network = build()
    state = torch.get_rng_state()
    network(torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("by_depth", [False, True])
def test_drop_path_is_scheduled_over_steps_and_by_depth(by_depth: bool) -> None:
    network = build(num_layers=6, num_filters=8, drop_path=0.4, drop_path_by_depth=by_depth)
    modules = [module for module in network.modules() if isinstance(module, DropPath)]
    for module in modules:
        module.set_progress(0.5)
    expected = [0.2 * (index + 1) / 8 if by_depth else 0.2 for index in range(8)]
    assert [module.drop_prob for module in modules] == pytest.approx(expected)


def test_auxiliary_head_sees_the_last_cell_before_the_second_reduction() -> None:
    torch.manual_seed(0)
    network = build(aux_head=True, image_size=16)
    _, aux_logits = network(torch.randn(4, 3, 16, 16))
    aux_logits.square().sum().backward()
    reached = {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None}
    assert reached == {"stem", "normal_0", "reduction_0", "normal_1", "aux_head"}


@pytest.mark.parametrize(
    ("size", "pooled"), [(14, 4), (8, 2), (5, 1), (4, 1), (1, 1)]
)  # 224 pixels through the ImageNet stem give 14
def test_auxiliary_head_is_pool_projection_and_full_size_convolution(
    size: int, pooled: int, references: ModuleType
) -> None:
    torch.manual_seed(0)
    head = AuxHead(6, 5, size, nn.BatchNorm2d).double()
    maps = torch.rand(3, 6, size, size, dtype=torch.float64)
    previous = torch.rand(3, 4, size, size)
    kernel = min(size, 5)
    rows = [slice(3 * i, 3 * i + kernel) for i in range(pooled)]
    x = torch.stack(
        [torch.stack([maps[:, :, r, c].sum(dim=(2, 3)) / kernel**2 for c in rows], -1) for r in rows], dim=-2
    )
    x = references.relu(references.norm(references.conv(x, head.reduce.weight), head.reduce_norm))
    assert x.shape == (3, 51, pooled, pooled)
    x = references.relu(references.norm(references.conv(x, head.full.weight, same=False), head.full_norm))
    assert x.shape == (3, 307, 1, 1)
    expected = x.flatten(1) @ head.linear.weight.T + head.linear.bias
    outputs = head((previous, maps))
    assert outputs[:2] == (previous, maps)
    torch.testing.assert_close(outputs[2], expected, rtol=1e-9, atol=1e-9)


def test_auxiliary_head_changes_nothing_in_evaluation() -> None:
    head = AuxHead(6, 5, 8, nn.BatchNorm2d).eval()
    inputs = (torch.rand(1, 4, 3, 3), torch.rand(1, 6, 3, 3))
    assert head(inputs) is inputs


def test_auxiliary_head_at_another_size_is_refused_with_both_sizes() -> None:
    head = AuxHead(6, 5, 8, nn.BatchNorm2d)
    with pytest.raises(ValueError, match=r"built for maps of 8 x 8, got 7 x 9"):
        head((torch.rand(2, 4, 7, 9), torch.rand(2, 6, 7, 9)))


def test_classifier_drops_features_in_training_only() -> None:
    torch.manual_seed(0)
    classifier = Classifier(2000, 1, dropout=0.25)
    nn.init.ones_(classifier.linear.weight)
    inputs = (torch.ones(1, 1, 3, 3), torch.ones(1, 2000, 3, 3))
    kept = (classifier(inputs).item() * 0.75) / 2000
    assert kept == pytest.approx(0.75, abs=0.04)
    assert classifier.eval()(inputs).item() == pytest.approx(2000)


@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_loss_of_an_untrained_network_is_near_that_of_guessing(num_classes: int) -> None:
    torch.manual_seed(0)
    network = build(num_filters=32, num_classes=num_classes)
    loss = nn.functional.cross_entropy(network(torch.randn(32, 3, 16, 16)), torch.arange(32) % num_classes)
    assert loss.item() == pytest.approx(math.log(num_classes), abs=0.6)


def test_batch_norm_takes_epsilon_and_momentum() -> None:
    norms = [m for m in build(bn_eps=1e-3, bn_momentum=3e-4).modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 3e-4)}


def test_same_seed_builds_the_same_layer_and_factories_can_be_sent_to_other_processes() -> None:
    for _, factory in pickle.loads(pickle.dumps(amoebanet(num_layers=2, num_filters=8, num_classes=3))):
        states = []
        for _ in range(2):
            torch.manual_seed(1)
            states.append(factory().state_dict())
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "C"}, "variant='C': expected one of B, D"),
        ({"num_layers": 1}, "num_layers=1: expected 2 or more"),
        ({"num_filters": 6}, "num_filters=6: expected a multiple of 4"),
        ({"num_classes": 0}, "num_classes=0: expected 1 or more"),
        ({"stem": "cifar"}, "stem='cifar': expected imagenet or small"),
        ({"dropout": 1.0}, "dropout=1.0: expected a probability"),
        ({"drop_path": -0.1}, "drop_path=-0.1: expected a probability"),
        ({"image_size": 7}, "image_size=7: expected 8 pixels or more"),
        ({"aux_head": True}, "aux_head=True: needs image_size"),
    ],
)
def test_argument_out_of_range_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message) as caught:
        amoebanet(**arguments)
    assert "\n" not in str(caught.value)


def test_all_wrong_arguments_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"variant='C'.*; num_layers=0"):
        amoebanet(variant="C", num_layers=0)


def test_bfloat16_autocast_runs_in_bfloat16_and_gives_nearly_the_same_loss() -> None:
    torch.manual_seed(0)
    network = build(num_filters=16, aux_head=True, image_size=16).to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    targets = torch.arange(4)
    expected = nn.functional.cross_entropy(network(images)[0], targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        boundary = network[:2](images)
        logits, aux_logits = network[2:](boundary)
        loss = nn.functional.cross_entropy(logits.float(), targets)
    assert {tensor.dtype for tensor in (*boundary, logits, aux_logits)} == {torch.bfloat16}
    (loss + aux_logits.float().square().mean()).backward()
    assert {parameter.grad.dtype for parameter in network.parameters() if parameter.grad is not None} == {torch.float32}
    assert loss.item() == pytest.approx(expected.item(), abs=0.1)


@pytest.mark.parametrize("variant", ["B", "D"])
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_a_network_of_split_cells_is_the_same_network(variant: str, stem: str) -> None:
    options: dict[str, Any] = {"variant": variant, "num_layers": 3, "num_filters": 8, "num_classes": 5, "stem": stem}
    torch.manual_seed(0)
    whole = nn.Sequential(OrderedDict((name, factory()) for name, factory in amoebanet(**options))).double()
    split = nn.Sequential(
        OrderedDict((name, factory()) for name, factory in amoebanet(**options, split_cells=True))
    ).double()
    assert len(split) == 2 * len(whole) - 2
    weights = {key.replace("_end.", "."): key for key in split.state_dict()}
    assert sorted(weights) == sorted(whole.state_dict())
    split.load_state_dict({own: whole.state_dict()[key] for key, own in weights.items()})
    images = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    outputs, expected = split(images), whole(images)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    outputs.square().mean().backward()
    expected.square().mean().backward()
    parameters = dict(split.named_parameters())
    for key, parameter in whole.named_parameters():
        torch.testing.assert_close(parameters[weights[key]].grad, parameter.grad, rtol=1e-10, atol=1e-12)


def test_both_halves_of_a_split_cell_do_a_fair_share() -> None:
    layers = amoebanet(num_layers=6, num_filters=64, split_cells=True, stem="imagenet")
    costs = {cost.name: cost.work for cost in count_costs(layers, torch.empty(4, 3, 224, 224, device="meta"))}
    for name in [name for name in costs if f"{name}_end" in costs]:
        assert 0.35 < costs[name] / (costs[name] + costs[f"{name}_end"]) < 0.66
