"""Plans: what they predict is consistent, agrees with the engine's counters, and impossible ones are refused."""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline import Pipeline, cut
from gpipe_cli.pipeline.memory import ActivationMeter
from gpipe_cli.pipeline.policies import cut_weights, make_schedule
from gpipe_cli.pipeline.profile import count_costs
from gpipe_cli.planning.network import make_planner
from gpipe_cli.planning.planner import Choice
from gpipe_cli.planning.text import describe
from gpipe_cli.training.networks import build_network

pytestmark = pytest.mark.usefixtures("counted_once")


def plan_of(config):
    planner = make_planner(config)
    return planner.evaluate(planner.first_choice())


def test_a_plan_counts_every_layer_and_parameter(plan_config):
    plan = plan_of(plan_config("partitions=3", "micro_batches=4"))
    layers = build_network(plan_config().model, 10, 16, 0)
    assert sum(plan.balance) == len(layers)
    assert plan.num_parameters == sum(p.numel() for _, build in layers for p in build().parameters())
    assert plan.samples_per_s == 16 / plan.simulation.step_time_s
    assert len(plan.stages) == len(plan.memory_bytes_per_rank) == 3


def test_the_cut_is_the_engines_on_predicted_times(plan_config):
    planner = make_planner(plan_config("partitions=3", "micro_batches=4", "remat=none"))
    plan = planner.evaluate(planner.first_choice())
    times = [sum(planner.layer_s(layer, 4, 3)) for layer in range(planner.num_layers + 1)]
    assert plan.balance == cut([*times[:-2], times[-2] + times[-1]], 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"])
def test_on_this_cpu_the_cut_is_the_one_that_the_engine_makes(plan_config, schedule, monkeypatch, round_hardware):
    words = ("partitions=3", "ranks=1", "micro_batches=8", "batch_size=32", "hardware=cpu", f"schedule={schedule}")
    config = plan_config(*words)
    planner = make_planner(config)
    monkeypatch.setattr(planner, "hardware", lambda ranks: round_hardware)
    layers = build_network(config.model, 10, 16, 0)
    costs = [cost.work for cost in count_costs(layers, torch.empty(4, 3, 16, 16, device="meta"))]
    pipe = Pipeline(layers, 3, 8, loss_fn=F.cross_entropy, schedule=schedule, costs=costs)
    choice = planner.first_choice()
    assert planner.evaluate(choice).balance == pipe.balance
    apart = planner.evaluate(dataclasses.replace(choice, ranks=None))
    assert apart.balance == cut(costs, 3, cut_weights(make_schedule(3, 8, schedule, "full")))


def test_a_given_balance_is_kept(plan_config):
    assert plan_of(plan_config("partitions=3", "micro_batches=4", "balance=[1,2,4]")).balance == (1, 2, 4)


@pytest.mark.parametrize(("partitions", "remat", "schedule", "taper"), [
    (1, "full", "gpipe", False), (1, "none", "gpipe", False), (3, "full", "gpipe", False),
    (3, "except_last", "1f1b", False), (3, "none", "1f1b", False), (3, "none", "1f1b", True),
    (3, "full", "eager_1f1b", True),
])  # fmt: skip
def test_predicted_peak_activations_are_those_that_the_engine_holds(plan_config, partitions, remat, schedule, taper):
    settings = (f"partitions={partitions}", "ranks=1", "micro_batches=4", f"remat={remat}", f"schedule={schedule}")
    config = plan_config(*settings, f"taper={taper}")
    plan = plan_of(config)
    layers = build_network(config.model, 10, 16, 0)
    pipe = Pipeline(
        layers, partitions, 4, loss_fn=F.cross_entropy, remat=remat, schedule=schedule, balance=plan.balance,
        taper=taper,
    )  # fmt: skip
    images, labels = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
    pipe.forward_backward(images, labels)
    with ActivationMeter(excluded=[*pipe.parameters(), *pipe.module.buffers()]) as meter:
        pipe.forward_backward(images, labels)
    predicted = plan.simulation.peak_saved_bytes[0] + plan.stages[0].footprint.resident_bytes
    assert predicted == pytest.approx(meter.peak_bytes, rel=0.1)


def test_a_tapered_plan_has_times_of_its_own_sizes_and_says_them(plan_config):
    config = plan_config("partitions=2", "micro_batches=8", "batch_size=64", "remat=none", "schedule=eager_1f1b")
    even = plan_of(config)
    config = dataclasses.replace(config, taper=True)
    tapered = plan_of(config)
    assert (even.sizes, tapered.sizes) == ((8,) * 8, (4, 8, 12, 12, 10, 8, 6, 4))
    first, _, third = (event.end_s - event.start_s for event in tapered.simulation.events[0][:3])
    assert first < third
    assert tapered.stages[0].cost.forward_s > even.stages[0].cost.forward_s
    assert "8 micro-batches of 4 to 12" in "\n".join(describe(config, tapered, 12.0))
    assert tapered.activation_bytes_by_remat[1]["none"] >= tapered.simulation.peak_activation_bytes[1]


def test_rematerialization_trades_memory_for_time(plan_config):
    full, none = (plan_of(plan_config("partitions=2", "micro_batches=8", f"remat={r}")) for r in ("full", "none"))
    assert full.activation_bytes < none.activation_bytes / 2
    assert full.simulation.step_time_s > none.simulation.step_time_s
    assert full.activation_bytes_by_remat == none.activation_bytes_by_remat
    peaks = [stage["full"] for stage in full.activation_bytes_by_remat]
    assert sum(peaks) == full.activation_bytes
    assert sum(stage["none"] for stage in full.activation_bytes_by_remat) == none.activation_bytes


def test_remat_auto_keeps_what_fits(plan_config):
    settings = ("partitions=2", "micro_batches=8")
    roomy = plan_of(plan_config(*settings, "remat=auto"))
    assert roomy.schedule.rematerialized == frozenset()
    full, none = (plan_of(plan_config(*settings, f"remat={r}")) for r in ("full", "none"))
    between = (max(full.memory_bytes_per_rank) + max(none.memory_bytes_per_rank)) / 2
    tight = plan_of(plan_config(*settings, "remat=auto", f"hardware.memory_gb={between / 1e9 + 0.6}"))
    assert tight.fits
    assert 0 < len(tight.schedule.rematerialized) < len(full.schedule.rematerialized)


def test_several_stages_on_a_rank_share_its_memory(plan_config):
    plan = plan_of(plan_config("partitions=4", "ranks=2", "micro_batches=4", "schedule=interleaved"))
    assert plan.schedule.stages_of_rank == ((0, 2), (1, 3))
    assert len(plan.memory_bytes_per_rank) == 2
    assert plan.memory_bytes_per_rank[0] > sum(plan.stages[stage].parameter_bytes for stage in (0, 2))


def test_recomputing_also_what_is_fresh_costs_a_single_micro_batch_a_forward_pass(plan_config):
    planner = make_planner(plan_config("partitions=2", "micro_batches=1"))
    choice = planner.first_choice()
    assert planner.evaluate(choice).schedule.rematerialized == frozenset()
    always = planner.evaluate(dataclasses.replace(choice, recompute_fresh=True))
    assert always.schedule.rematerialized == {(0, 0), (1, 0)}
    assert always.simulation.step_time_s > planner.evaluate(choice).simulation.step_time_s


def test_a_cut_by_memory_has_the_smaller_largest_rank(plan_config):
    planner = make_planner(plan_config("partitions=3", "micro_batches=16", "model.filters=256"))
    by_time = planner.evaluate(planner.first_choice())
    by_memory = planner.evaluate(dataclasses.replace(planner.first_choice(), cut="memory"))
    assert max(by_memory.memory_bytes_per_rank) <= max(by_time.memory_bytes_per_rank)


def test_uneven_micro_batches_are_planned_by_the_largest(plan_config):
    assert plan_of(plan_config("partitions=1", "micro_batches=3")).stages[0].cost.forward_s == pytest.approx(
        plan_of(plan_config("partitions=1", "micro_batches=2", "batch_size=12")).stages[0].cost.forward_s
    )


@pytest.mark.parametrize(("settings", "message"), [
    (("partitions=8", "micro_batches=1"), "partitions=8: the network has 7 layers"),
    (("partitions=2", "micro_batches=1", "balance=[3,3]"), r"balance=\[3,3\]: sums to 6, the network has 7 layers"),
    (("partitions=3", "ranks=2", "micro_batches=1", "schedule=interleaved"), "3 stages cannot be dealt evenly"),
])  # fmt: skip
def test_what_cannot_be_is_refused(plan_config, settings, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(plan_config(*settings))


GIANTS = {
    "AmoebaNet-D (72, 512) on 8": """
        from gpipe_cli.cli import main
        main(["plan", "model=amoebanet_d", "model.layers=72", "model.filters=512", "model.aux_head=false",
              "partitions=8", "micro_batches=32", "hardware=tpu_v2"])
    """,
    "Transformer of 1663 blocks on 128": """
        from gpipe_cli.cli import main
        main(["plan", "model=transformer_84b", "partitions=128", "hardware=tpu_v3"])
    """,
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("code", GIANTS.values(), ids=GIANTS)
def test_giants_are_planned_in_seconds_and_without_their_memory(code, tmp_path: Path):
    """The promise is 5 s and 1 GiB, imports included. CPU seconds, and twice as many: the machine may be busy."""
    lines = "\n".join(line.strip() for line in code.splitlines())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Not ru_maxrss: a child's begins with that of the process it was forked from.
    report = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    command = [sys.executable, "-c", f"{lines}\n{report}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert int(done.stdout.split()[-1]) * 1024 < 2**30


def test_a_choice_has_no_hidden_defaults(plan_config):
    choice = make_planner(plan_config("partitions=2", "micro_batches=4")).first_choice()
    assert choice == Choice(partitions=2, micro_batches=4, batch_size=16, remat="full", cut="flops")
