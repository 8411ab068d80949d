"""Every file of conf/ composes, every default builds, every knob is read; presets and recipes are the paper's."""

from __future__ import annotations

import ast
import dataclasses
import re
from importlib import resources
from pathlib import Path

import pytest
import yaml
from gpipe_cli.models.transformer.presets import PRESETS, Preset

import gpipe_cli
from gpipe_cli.catalogue import CONFIG_PACKAGE, group_choices, keys_of_choice, typed_keys
from gpipe_cli.compose import OPTIONAL_GROUPS, load
from gpipe_cli.errors import ConfigError

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
def test_every_model_goes_with_every_data_set_of_its_kind(model: str, dataset: str) -> None:
    words = [f"model={model}", f"dataset={dataset}", *REQUIRED.get(f"model={model}", [])]
    if model == "module" and dataset == "text":
        words.append("model.seq_len=16")
    if model != "module" and model.startswith("transformer") != (dataset == "text"):
        with pytest.raises(ConfigError, match=r"(reads text|sees pictures); use "):
            load("train", words)
    else:
        assert load("train", words).dataset.name == dataset


def test_text_and_the_transformer_choose_each_other_and_their_recipe() -> None:
    for words in (["model=transformer"], ["dataset=text"]):
        config = load("train", words)
        assert (config.model.name, config.dataset.name, config.image_size) == ("transformer", "text", None)
        assert (config.lr_schedule.name, config.lr_schedule.warmup_steps, config.batch_size) == ("inverse_sqrt", 150, 8)
    large = load("train", ["model=transformer_84b"])
    assert (large.optimizer.name, large.optimizer.lr, large.lr_schedule.warmup_steps) == ("adam", 5.5e-5, 40_000)
    assert (large.batch_size, large.model.layers) == (32, 1663)
    other = load("train", ["model=transformer", "lr_schedule=cosine", "optimizer=sgd"])
    assert (other.lr_schedule.name, other.optimizer.lr, other.batch_size) == ("cosine", 0.1, 8)


def test_recipes_are_named_after_a_data_set_or_fine_tuning_and_a_model() -> None:
    purposes = ("transfer", *group_choices()["dataset"])
    pairs = {f"{purpose}_{model}" for purpose in purposes for model in group_choices()["model"]}
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


@pytest.mark.parametrize("preset", PRESETS)
def test_transformer_presets_are_those_of_the_models(preset: str) -> None:
    """The command line has no access to models/, so the sizes stand in both; file names have no dots and are short."""
    file = {"tiny": "transformer", "5.3b": "transformer_5b", "83.9b": "transformer_84b", "48_layers": "transformer_48"}
    model, expected = load("train", [f"model={file.get(preset, f'transformer_{preset}')}"]).model, PRESETS[preset]
    sizes = {field.name for field in dataclasses.fields(Preset)} - {"reported_parameters", "source", "num_layers"}
    assert {name: getattr(model, name) for name in sizes} == {name: getattr(expected, name) for name in sizes}
    assert (model.name, model.layers, model.tied) == ("transformer", expected.num_layers, False)


def test_every_transformer_file_is_a_preset() -> None:
    files = [name for name in group_choices()["model"] if name.startswith("transformer")]
    assert len(files) == len(PRESETS)


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


def test_fine_tuning_the_papers_network_has_the_values_of_section_4_and_those_of_imagenet() -> None:
    config = load("transfer", ["model=amoebanet_b", "dataset=cifar100"])
    assert (config.image_size, config.seeds, config.dataset.augment, config.partitions) == (480, 5, "cutout", 4)
    assert (config.freeze, config.layer_decay, config.head_warmup_epochs) == (False, 1.0, 0.0)
    imagenet = load("train", ["model=amoebanet_b", "dataset=imagenet"])
    same = "model optimizer lr_schedule batch_size micro_batches label_smoothing ema_decay epochs"
    assert all(getattr(config, name) == getattr(imagenet, name) for name in same.split())


def test_fine_tuning_has_every_setting_of_training_and_its_values() -> None:
    train, transfer = load("train", []), load("transfer", [])
    own = {"command", "checkpoint", "freeze", "layer_decay", "head_warmup_epochs", "seeds"}
    values = {key: value for key, value in vars(transfer).items() if key not in own}
    assert values == {key: value for key, value in vars(train).items() if key != "command"}


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
