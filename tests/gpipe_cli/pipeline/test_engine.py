"""The engine's promise: for every cut and every number of processes, the numbers of the plain network."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline import Pipeline, make_schedule


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    del targets
    return outputs.square().mean()


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def two_weights() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def convolutions() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 2),
    ).double()


def images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64),
        torch.randn(samples, 2, generator=generator, dtype=torch.float64),
    )


def with_batchnorm_and_dropout() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3),
        nn.Conv2d(6, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2),
    ).double()  # fmt: skip


@pytest.mark.parametrize(("partitions", "micro_batches"), list(itertools.product([1, 2], [1, 2, 4, 8])))
def test_loss_and_gradients_do_not_grow_with_the_number_of_micro_batches(step, partitions, micro_batches):
    x = torch.arange(1.0, 9.0, dtype=torch.float64).view(8, 1)
    report = step(two_weights, x, x, mean_square, partitions=partitions, micro_batches=micro_batches)
    assert report["losses"] == [25.5]
    assert [g.item() for g in report["gradients"].values()] == [51.0, 51.0]


@pytest.mark.parametrize("samples", [8, 7, 5])
@pytest.mark.parametrize(("partitions", "micro_batches"), [(1, 1), (1, 3), (2, 4), (3, 2), (4, 5), (4, 1), (6, 3)])
def test_equals_plain_pytorch_for_any_partition_and_unequal_micro_batches(
    step, plain, assert_same, samples, partitions, micro_batches
):
    x, y = images(samples)
    for remat in ("full", "none"):
        report = step(
            convolutions, x, y, squared_error, partitions=partitions, micro_batches=micro_batches, remat=remat
        )
        assert_same(report, plain(convolutions, x, y, squared_error), 1e-12)
        assert report["num_samples"] == samples


@pytest.mark.parametrize(("schedule", "taper"), [
    ("gpipe", False), ("1f1b", False), ("eager_1f1b", False), ("zero_bubble", False), ("eager_1f1b", True),
])  # fmt: skip
def test_same_bits_for_every_cut_number_of_processes_and_rematerialization(step, assert_same, schedule, taper):
    x, y = images(9)
    options: dict[str, Any] = {"micro_batches": 4, "schedule": schedule, "seed": 11, "steps": 3, "lr": 0.1}
    options["taper"] = taper
    reference = step(with_batchnorm_and_dropout, x, y, squared_error, partitions=1, **options)
    assert len(set(reference["losses"])) == 3
    for partitions, ranks, balance, remat in [
        (1, 1, None, "none"), (2, 2, [1, 8], "full"), (2, 1, [5, 4], "except_last"), (4, 4, [2, 2, 2, 3], "none"),
        (4, 2, [1, 5, 2, 1], "full"), (4, 3, None, "except_last"), (9, 2, None, "full"),
    ]:  # fmt: skip
        report = step(
            with_batchnorm_and_dropout, x, y, squared_error,
            partitions=partitions, ranks=ranks, balance=balance, remat=remat, **options,
        )  # fmt: skip
        assert_same(report, reference, 0.0)


def test_schedules_agree_to_rounding(step, assert_same):
    x, y = images(8)
    a, b, c, d, e, f = (
        step(
            with_batchnorm_and_dropout, x, y, squared_error,
            partitions=4, micro_batches=4, schedule=schedule, remat=remat, kept=kept, ranks=ranks,
        )
        for schedule, remat, kept, ranks in [
            ("gpipe", "full", None, 4), ("1f1b", "auto", [2, 1, 1, 1], 4),
            ("interleaved", "full", None, 2), ("interleaved", "none", None, 1),
            ("zero_bubble", "none", None, 4), ("zero_bubble", "auto", [1, 2, 1, 2], 2),
        ]
    )  # fmt: skip
    assert_same(a, b, 1e-12)
    assert_same(a, c, 1e-12)
    assert_same(a, d, 1e-12)
    assert_same(a, e, 1e-12)
    assert_same(a, f, 1e-12)


def samples_of_layers(taper: bool) -> list[tuple[int, int]]:
    """Samples of the micro-batches at the first layer and in the loss, in order."""
    x, y = images(32)
    seen: list[tuple[int, int]] = []
    model = convolutions()
    model[0].register_forward_pre_hook(lambda _, inputs: seen.append((len(inputs[0]), 0)))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen[-1] = (seen[-1][0], len(targets))
        return squared_error(outputs, targets)

    pipe = Pipeline(model, 2, 8, loss_fn=loss, schedule="1f1b", remat="none", taper=taper)
    pipe.forward_backward(x, y)
    return sorted(seen)


def test_tapered_micro_batches_begin_and_end_small():
    assert samples_of_layers(taper=False) == [(4, 4)] * 8
    assert samples_of_layers(taper=True) == [(size, size) for size in sorted((2, 4, 6, 6, 5, 4, 3, 2))]


@pytest.mark.parametrize("samples", [24, 13, 7])
def test_tapered_micro_batches_equal_plain_pytorch(step, plain, assert_same, samples):
    x, y = images(samples)
    report = step(convolutions, x, y, squared_error, partitions=3, micro_batches=6, schedule="1f1b", taper=True)
    assert_same(report, plain(convolutions, x, y, squared_error), 1e-12)
    assert report["num_samples"] == samples


def test_taper_belongs_to_a_schedule_that_is_given_whole():
    tapered = make_schedule(2, 4, "1f1b", num_ranks=1, taper=True)
    assert Pipeline(convolutions(), 2, 4, loss_fn=squared_error, schedule=tapered).schedule.tapered
    with pytest.raises(ValueError, match="taper belongs to the schedule"):
        Pipeline(convolutions(), 2, 4, loss_fn=squared_error, schedule=make_schedule(2, 4, num_ranks=1), taper=True)


def operations_that_give_gradients_of_weights(remat: str) -> list[str]:
    x, y = images(12)
    pipe = Pipeline(convolutions(), 2, 6, loss_fn=squared_error, balance=[2, 4], schedule="zero_bubble", remat=remat)
    times: list[float] = []
    weight = next(pipe.parameters())
    weight.register_post_accumulate_grad_hook(lambda _: times.append(time.perf_counter()))
    events = pipe.forward_backward(x, y).trace.events
    return [str(e.operation) for at in times for e in events if e.start_s <= at <= e.end_s]


def test_zero_bubble_gives_gradients_of_weights_when_the_schedule_says(run_ranks):
    first, last = run_ranks(2, operations_that_give_gradients_of_weights, "none")
    assert first == ["0B0", "0B1", "0B2", "0B3", "0B4", "0B5"]
    assert last == ["1B0", "1B1", "1B2", "1W3", "1W4", "1W5"]
    first, last = run_ranks(2, operations_that_give_gradients_of_weights, "full")
    assert last == ["1B0", "1B1", "1B2", "1W3", "1W4", "1W5"]


def evaluate_interleaved() -> dict[str, Any]:
    pipe = Pipeline(with_batchnorm_and_dropout(), 4, 3, loss_fn=squared_error, schedule="interleaved")
    return {"outputs": pipe.evaluate(images(7)[0])}


def test_evaluation_works_with_interleaved_stages(run_ranks):
    _, last = run_ranks(2, evaluate_interleaved)
    expected = with_batchnorm_and_dropout().eval()(images(7)[0])
    torch.testing.assert_close(last["outputs"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_fewer_micro_batches_than_partitions_completes_with_equal_losses(step, micro_batches):
    x, y = images(8)
    report = step(convolutions, x, y, squared_error, partitions=4, micro_batches=micro_batches)
    reference = step(convolutions, x, y, squared_error, partitions=4, micro_batches=4)
    assert report["losses"] == pytest.approx(reference["losses"], rel=1e-12)


def test_a_mini_batch_smaller_than_the_number_of_micro_batches_is_refused_in_one_line():
    pipe = Pipeline(convolutions(), num_micro_batches=4, loss_fn=squared_error)
    with pytest.raises(
        ValueError, match=r"^num_micro_batches=4: a mini-batch of 3 samples is too small; use at most 3"
    ):
        pipe.forward_backward(*images(3))


def train_between_evaluations(evaluate: bool) -> dict[str, Any]:
    x, y = images(8)
    pipe = Pipeline(with_batchnorm_and_dropout(), 2, 2, loss_fn=squared_error)
    losses: list[float] = []
    outputs = []
    for number in range(4):
        if evaluate:
            before = torch.get_rng_state()
            modes = [m.training for m in pipe.module.modules()]
            state = {k: v.clone() for k, v in pipe.state_dict().items()}
            outputs.append(pipe.evaluate(x[: 1 + 3 * (number % 2)]))
            assert torch.equal(before, torch.get_rng_state())
            assert modes == [m.training for m in pipe.module.modules()]
            assert all(torch.equal(v, state[k]) for k, v in pipe.state_dict().items())
        if number != 1:
            losses.append(float(pipe.forward_backward(x, y).loss))
    return {"losses": losses, "gradients": {n: p.grad for n, p in pipe.named_parameters()}, "sizes": [
        0 if o is None else o.shape[0] for o in outputs
    ]}  # fmt: skip


def test_evaluation_between_training_steps_leaves_no_trace(run_ranks):
    with_evaluation = run_ranks(2, train_between_evaluations, True)
    without = run_ranks(2, train_between_evaluations, False)
    for a, b in zip(with_evaluation, without, strict=True):
        assert a["losses"] == b["losses"]
        assert all(torch.equal(a["gradients"][name], b["gradients"][name]) for name in a["gradients"])
    assert [r["sizes"] for r in with_evaluation] == [[0, 0, 0, 0], [1, 4, 1, 4]]


def evaluate_everywhere(num_partitions: int) -> dict[str, Any]:
    pipe = Pipeline(with_batchnorm_and_dropout(), num_partitions, 3, loss_fn=squared_error)
    x, _ = images(7)
    return {"outputs": [pipe.evaluate(x[:samples]) for samples in (7, 1, 2, 5)]}


def test_evaluation_equals_the_plain_network_for_any_number_of_samples(run_ranks):
    x, _ = images(7)
    model = with_batchnorm_and_dropout().eval()
    expected = [model(x[:samples]) for samples in (7, 1, 2, 5)]
    *others, last = run_ranks(4, evaluate_everywhere, 4)
    assert all(output is None for report in others for output in report["outputs"])
    for output, reference in zip(last["outputs"], expected, strict=True):
        torch.testing.assert_close(output, reference, rtol=1e-12, atol=1e-12)


def test_factories_give_the_same_weights_for_every_cut_and_different_ones_per_layer(step):
    def make() -> list[Any]:
        return [(f"layer{i}", lambda: nn.Linear(4, 4)) for i in range(4)]

    x = torch.ones(4, 4)
    states = [step(make, x, x, squared_error, partitions=partitions, seed=7)["state"] for partitions in (1, 2, 4)]
    for state in states[1:]:
        assert all(torch.equal(state[key], states[0][key]) for key in states[0])
    weights = [states[0][f"layer{i}.weight"] for i in range(4)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(weights, 2))
    other_seed = step(make, x, x, squared_error, seed=8)["state"]
    assert not torch.equal(other_seed["layer0.weight"], weights[0])


def built_names() -> list[str]:
    built: list[str] = []

    def factory(name: str) -> Any:
        def build() -> nn.Module:
            layer = nn.Linear(2, 2)
            if layer.weight.device.type != "meta":
                built.append(name)
            return layer

        return build

    Pipeline([(name, factory(name)) for name in "abcd"], 2, 1, loss_fn=squared_error)
    return built


def test_a_rank_builds_only_its_own_layers(run_ranks):
    assert run_ranks(2, built_names) == [["a", "b"], ["c", "d"]]


def test_state_has_the_keys_of_the_plain_sequential_and_loads_into_it(step):
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(OrderedDict(first=nn.Linear(3, 3), norm=nn.BatchNorm1d(3), last=nn.Linear(3, 1)))

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    report = step(make, x, torch.zeros(6, 1), squared_error, partitions=2, micro_batches=2, lr=0.1)
    plain_model = make()
    plain_model.load_state_dict(report["state"], strict=True)
    assert list(plain_model.state_dict()) == list(report["state"])


def test_parameters_are_counted_over_all_ranks(step):
    x, y = images(4)
    expected = sum(p.numel() for p in convolutions().parameters())
    for partitions in (1, 3):
        assert step(convolutions, x, y, squared_error, partitions=partitions)["num_parameters"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_partitions": 7}, r"num_partitions=7: 6 layers can be cut into 1 to 6 partitions"),
        ({"num_partitions": 2, "balance": [3, 4]}, r"balance=\[3, 4\]: sums to 7, the network has 6 layers"),
        ({"num_partitions": 2, "balance": [6]}, r"balance=\[6\]: 1 entries for 2 partitions"),
        ({"num_partitions": 2, "balance": [6, 0]}, r"balance=\[6, 0\]: a partition without layers"),
        ({"schedule": "fifo"}, "schedule=fifo: choose one of gpipe, 1f1b, eager_1f1b, zero_bubble, interleaved"),
        ({"remat": "some"}, "remat=some: choose one of full, except_last, none, auto"),
        ({"num_micro_batches": 0}, "num_micro_batches=0"),
    ],
)  # fmt: skip
def test_impossible_arguments_are_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(convolutions(), loss_fn=squared_error, **arguments)


def balance_in_two_processes(remat: str, schedule: str = "1f1b", micro_batches: int = 8) -> dict[str, Any]:
    layers = [(f"layer{i}", nn.Identity) for i in range(14)]
    pipe = Pipeline(layers, 2, micro_batches, loss_fn=squared_error, costs=[1.0] * 14, schedule=schedule, remat=remat)
    return {"balance": list(pipe.balance)}


def test_a_stage_that_recomputes_nothing_gets_more_layers(run_ranks):
    assert run_ranks(2, balance_in_two_processes, "full") == [{"balance": [6, 8]}] * 2
    assert run_ranks(2, balance_in_two_processes, "none") == [{"balance": [7, 7]}] * 2


def test_a_rank_that_never_waits_gets_more_layers(run_ranks):
    assert run_ranks(2, balance_in_two_processes, "none", "eager_1f1b", 4) == [{"balance": [8, 6]}] * 2
    assert run_ranks(2, balance_in_two_processes, "none", "1f1b", 4) == [{"balance": [7, 7]}] * 2


def test_a_loss_that_is_no_scalar_is_refused():
    pipe = Pipeline(convolutions(), loss_fn=lambda o, t: (o - t).square())
    with pytest.raises(TypeError, match="loss_fn returned a tensor of shape"):
        pipe.forward_backward(*images(4))
