"""Which tensors of a network are loaded, which begin anew, and which make it another network."""

from __future__ import annotations

from gpipe_cli.training.transfer import find_heads, make_plan, structure

HEADS = ("aux_head", "classifier")
BODY = {"stem.weight": (4, 3), "stem.running_mean": (4,), "stem.num_batches_tracked": ()}


def shapes(num_classes: int, size: int = 2) -> dict[str, tuple[int, ...]]:
    auxiliary = {"aux_head.full.weight": (6, 4, size, size), "aux_head.linear.weight": (num_classes, 6)}
    return {**BODY, **auxiliary, "classifier.weight": (num_classes, 4), "classifier.bias": (num_classes,)}


def test_the_head_is_the_last_layer_with_parameters_and_the_auxiliary_one() -> None:
    assert find_heads(["conv.weight", "norm.bias", "fc.weight", "fc.bias"]) == ("fc",)
    assert find_heads([*shapes(3)]) == HEADS


def test_what_depends_on_the_classes_begins_anew_and_the_rest_is_loaded() -> None:
    plan = make_plan(shapes(3), shapes(7), HEADS, num_classes=3)
    assert plan.replaced == {
        "aux_head.linear.weight": (7, 6), "classifier.weight": (7, 4), "classifier.bias": (7,),
    }  # fmt: skip
    assert plan.loaded == (*BODY, "aux_head.full.weight")
    assert (plan.misfits, plan.unused) == ((), ())


def test_as_many_classes_are_still_other_classes() -> None:
    plan = make_plan(shapes(7), shapes(7), HEADS, num_classes=7)
    assert set(plan.replaced) == {"aux_head.linear.weight", "classifier.weight", "classifier.bias"}


def test_an_auxiliary_head_may_differ_or_be_missing() -> None:
    assert make_plan(shapes(3, size=2), shapes(3, size=5), HEADS, 3).replaced["aux_head.full.weight"] == (6, 4, 5, 5)
    without = {name: shape for name, shape in shapes(7).items() if not name.startswith("aux_head")}
    assert make_plan(shapes(3), without, HEADS, 3).replaced["aux_head.full.weight"] is None
    plan = make_plan(without, shapes(7), ("classifier",), 7)
    assert sorted(plan.unused) == ["aux_head.full.weight", "aux_head.linear.weight"]
    assert plan.misfits == ()


def test_a_body_that_lacks_has_more_or_has_another_shape_is_another_network() -> None:
    ours = shapes(3)
    assert make_plan(ours, {**ours, "stem.weight": (8, 3)}, HEADS, 3).misfits == ("stem.weight",)
    assert make_plan(ours, {**ours, "more.weight": (8, 3)}, HEADS, 3).misfits == ("more.weight",)
    assert make_plan({**ours, "more.weight": (8, 3)}, ours, HEADS, 3).misfits == ("more.weight",)


def test_networks_are_compared_by_what_decides_their_tensors() -> None:
    model = {"name": "amoebanet", "variant": "D", "layers": 3, "filters": 8, "stem": "auto", "split_cells": True}
    assert structure({**model, "dropout": 0.5}, 32) == structure({**model, "stem": "small"}, 96)
    assert structure(model, 32) != structure(model, 64)
    module = {"name": "module", "factory": "a:b", "kwargs": {"width": 2}}
    assert structure({**module, "layers": 3}, 32) == module
