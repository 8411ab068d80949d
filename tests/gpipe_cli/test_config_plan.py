"""The settings of `gpipe plan`: types, and combinations that cannot work, each refused in one line."""

from __future__ import annotations

import ast
import dataclasses
from importlib import resources
from pathlib import Path

import pytest
import yaml

import gpipe_cli
from gpipe_cli.catalogue import CONFIG_PACKAGE, group_choices, keys_of_choice
from gpipe_cli.compose import load
from gpipe_cli.config_plan import HardwareConfig, PlanConfig
from gpipe_cli.errors import ConfigError


def test_partitions_and_micro_batches_are_numbers_or_auto():
    config = load("plan", [])
    assert (config.partitions, config.micro_batches) == ("auto", "auto")
    config = load("plan", ["partitions=4", "micro_batches=32"])
    assert (config.partitions, config.micro_batches) == (4, 32)


@pytest.mark.parametrize("suite", group_choices("plan")["suite"])
def test_every_suite_and_hardware_composes(suite):
    assert load("plan", [f"suite={suite}"]).suite == suite


@pytest.mark.parametrize("hardware", group_choices("plan")["hardware"])
def test_every_hardware_composes(hardware):
    assert load("plan", [f"hardware={hardware}"]).hardware.name == hardware


def test_every_knob_is_in_the_files_and_read_by_the_work():
    root = yaml.safe_load((resources.files(CONFIG_PACKAGE) / "plan.yaml").read_text(encoding="utf-8"))
    own = {field.name for field in dataclasses.fields(PlanConfig)} - {"command", *group_choices("plan")}
    assert own == set(root) - {"defaults"}
    hardware = {field.name for field in dataclasses.fields(HardwareConfig)}
    assert all(keys_of_choice("hardware", name) == hardware for name in group_choices("plan")["hardware"])
    source = Path(gpipe_cli.__file__).parent
    read: set[str] = set()
    for file in [*source.glob("planning/*.py"), source / "commands" / "plan.py"]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert (own | hardware) - read == set()


@pytest.mark.parametrize(("words", "line"), [
    (["suite=tabel1"], "suite=tabel1: choose one of table1, table2, table3, torchgpipe; did you mean table1?"),
    (["hardware=p4000"], "hardware=p4000: choose one of a100, cpu, h100, h200, p100, p40, tpu_v2, tpu_v3, v100; "
     "did you mean p40?"),
    (["partitions=some"], "partitions=some: expected a whole number, 1 or more, or auto"),
    (["partitions=0"], "partitions=0: expected a whole number, 1 or more, or auto"),
    (["micro_batches=2.5"], "micro_batches=2.5: expected a whole number, 1 or more, or auto"),
    (["micro_batches=129"], "micro_batches=129: there are only batch_size=128 samples to split; use at most that, or "
     "auto"),
    (["balance=[5,5]"], "balance=[5,5]: names 2 partitions but partitions=auto; make them equal"),
    (["partitions=2", "ranks=3"], "ranks=3: there is work for partitions=2 ranks only; use that or less"),
    (["ranks=3"], "ranks=3: give partitions as well; for partitions=auto use accelerators"),
    (["schedule=interleaved", "partitions=4"], "schedule=interleaved: deals several partitions to each rank; give "
     "ranks=R and a multiple of R as partitions"),
    (["hardware=p40", "precision=bf16"], "precision=bf16: hardware=p40 has no bfloat16 units; use precision=fp32"),
    (["hardware=p40", "cut=time"], "cut=time: measures layers here, but hardware=p40; use cut=flops, or hardware=cpu"),
    (["hardware=p40", "hardware.memory_gb=null"], "hardware.memory_gb=null: only hardware=cpu can be measured; give a "
     "number"),
    (["hardware=p40", "threads=2"], "threads=2: hardware=p40 has none; use hardware=cpu"),
    (["suite=table1", "partitions=4"], "partitions=4: suite=table1 sets it for every row; leave one of them out"),
    (["suite=table1", "hardware=p40"], "hardware=p40: suite=table1 sets it for every row; leave one of them out"),
    (["suite=table1", "model.layers=5"], "model=amoebanet: suite=table1 sets it for every row; leave one of them out"),
    (["model=transformer", "image_size=64"], "image_size=64: model=transformer reads text of model.seq_len=128 tokens, "
     "no pictures; leave it out"),
    (["model=transformer", "num_classes=10"], "num_classes=10: model=transformer tells model.vocab_size=256 tokens "
     "apart; leave it out"),
    (["suite=table2", "model=transformer"], "model=transformer: suite=table2 sets it for every row; leave one of them "
     "out"),
    (["dataset=digits"], "dataset=digits: unknown key; gpipe plan --help lists the keys"),
    (["suite=table1", "baseline=null"], "baseline=null: unknown key; gpipe plan --help lists the keys"),
])  # fmt: skip
def test_a_refusal_is_one_line(words, line):
    with pytest.raises(ConfigError) as refused:
        load("plan", words)
    assert str(refused.value) == line
