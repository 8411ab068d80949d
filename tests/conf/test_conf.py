"""Every file of conf/ composes, every default builds, every knob is read; presets and recipes are the paper's."""

from __future__ import annotations

import ast
import re
from importlib import resources
from pathlib import Path

import pytest
import yaml

import gpipe_cli
from gpipe_cli.catalogue import CONFIG_PACKAGE, group_choices, keys_of_choice, typed_keys
from gpipe_cli.compose import OPTIONAL_GROUPS, load

# What a file needs besides its choice.
REQUIRED = {"model=module": ["model.factory=a:b"], "optimizer=timm": ["optimizer.name=lamb"]}
CHOICES = [f"{group}={choice}" for group, choices in group_choices().items() for choice in choices]


def test_the_default_configuration_is_valid() -> None:
    config = load("train", [])
    assert (config.model.name, config.dataset.name) == ("amoebanet", "digits")


@pytest.mark.parametrize("choice", CHOICES)
def test_every_file_composes_to_a_valid_configuration(choice: str) -> None:
    load("train", [choice, *REQUIRED.get(choice, [])])


@pytest.mark.parametrize("dataset", group_choices()["dataset"])
@pytest.mark.parametrize("model", group_choices()["model"])
def test_every_model_goes_with_every_data_set(model: str, dataset: str) -> None:
    config = load("train", [f"model={model}", f"dataset={dataset}", *REQUIRED.get(f"model={model}", [])])
    assert config.dataset.name == dataset


def test_recipes_are_named_after_a_data_set_and_a_model() -> None:
    pairs = {f"{dataset}_{model}" for dataset in group_choices()["dataset"] for model in group_choices()["model"]}
    assert set(group_choices()["recipe"]) <= pairs


def test_every_knob_is_in_the_files() -> None:
    in_groups = {f"{group}.{name}" for group, name in names_in_groups()}
    root = yaml.safe_load((resources.files(CONFIG_PACKAGE) / "train.yaml").read_text(encoding="utf-8"))
    assert {key for key, _, _ in typed_keys()} == in_groups | set(root) - {"defaults"}


def names_in_groups() -> set[tuple[str, str]]:
    settings = {group for group in group_choices() if group not in OPTIONAL_GROUPS}
    return {
        (group, name)
        for group in settings
        for choice in group_choices()[group]
        for name in keys_of_choice(group, choice)
    }


SOURCE = Path(gpipe_cli.__file__).parent
# Where settings are declared and checked: to be named there is not to be read.
DECLARING = {"config.py", "checks.py", "fields.py", "catalogue.py", "compose.py", "help.py", "overrides.py"}


@pytest.mark.skipif(
    not (SOURCE / "commands" / "train.py").exists(),
    reason="the settings' reader, commands/train.py, does not exist yet",
)
def test_every_knob_is_read_below_the_command_line() -> None:
    read = set()
    for file in SOURCE.rglob("*.py"):
        if file.name not in DECLARING:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {key for key, _, _ in typed_keys() if key.rpartition(".")[2] not in read} == set()


@pytest.mark.parametrize(
    ("preset", "variant", "layers", "filters"), [("amoebanet_b", "B", 18, 512), ("amoebanet_d", "D", 18, 256)]
)
def test_presets_are_the_papers_networks(preset: str, variant: str, layers: int, filters: int) -> None:
    model = load("train", [f"model={preset}"]).model
    assert (model.variant, model.layers, model.filters, model.stem) == (variant, layers, filters, "imagenet")


def test_the_imagenet_recipe_has_the_values_of_the_paper_and_its_reference() -> None:
    config = load("train", ["model=amoebanet_b", "dataset=imagenet"])
    assert (config.image_size, config.partitions) == (480, 4)
    assert (config.batch_size, config.label_smoothing, config.ema_decay) == (256, 0.1, 0.9999)
    assert config.clip_grad_norm is None
    assert config.dataset.augment == "inception"
    model, optimizer, lr_schedule = config.model, config.optimizer, config.lr_schedule
    assert (model.aux_head, model.aux_weight, model.drop_path) == (True, 0.4, 0.0)
    assert (model.bn_momentum, model.bn_eps) == (0.1, 1e-5)
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay, optimizer.momentum) == ("rmsproptf", 0.64, 4e-5, 0.9)
    assert optimizer.options == {"alpha": 0.9, "eps": 1.0}
    assert (lr_schedule.name, lr_schedule.decay_rate, lr_schedule.decay_epochs) == ("exponential", 0.9, 1.0)
    assert lr_schedule.warmup_epochs == 3.0


def test_experiments_are_the_references_networks() -> None:
    tpu = load("train", ["experiment=imagenet_tpu"])
    assert (tpu.model.variant, tpu.model.layers, tpu.model.filters, tpu.image_size) == ("D", 12, 256, 299)
    assert (tpu.optimizer.lr, tpu.batch_size) == (0.64, 256)
    short = load("train", ["experiment=imagenet_short"])
    assert (short.model.layers, short.image_size, short.batch_size, short.epochs) == (6, 224, 1024, 35)
    assert (short.optimizer.lr, short.lr_schedule.decay_rate) == (2.56, 0.88)


def test_every_file_begins_by_saying_what_it_is() -> None:
    for file in (Path(str(resources.files(CONFIG_PACKAGE)))).rglob("*.yaml"):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("# @package")]
        assert re.match(r"# .{20,}", lines[0]), file
