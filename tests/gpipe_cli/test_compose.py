"""From words to a checked configuration.

Misspelt keys: hydra-ecosystem/hydra#1912 and #1457, where the advice to add `+` made a key that nobody reads.
"""

from __future__ import annotations

import pytest

from gpipe_cli.catalogue import choices_with_key, group_choices
from gpipe_cli.compose import compose, load
from gpipe_cli.errors import ConfigError

DATASETS = ", ".join(group_choices()["dataset"])
CHOICES = {group: ", ".join(choices) for group, choices in group_choices().items()}
WITH_A_PATH = ", ".join(f"dataset={name}" for name in choices_with_key("dataset", "path"))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        load("train", words)
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("partitons=4", "partitons=4: unknown key; did you mean partitions?"),
        ("+partitons=4", "+partitons=4: unknown key; did you mean partitions?"),
        ("++partitons=4", "++partitons=4: unknown key; did you mean partitions?"),
        ("microbatches=4", "microbatches=4: unknown key; did you mean micro_batches?"),
        ("model.layer=4", "model.layer=4: unknown key; did you mean model.layers?"),
        ("lr=0.1", "lr=0.1: unknown key; did you mean optimizer.lr?"),
        ("warmup_epochs=1", "warmup_epochs=1: unknown key; did you mean lr_schedule.warmup_epochs?"),
        ("clip=1", "clip=1: unknown key; did you mean clip_grad_norm?"),
        ("modle=amoebanet", "modle=amoebanet: unknown key; did you mean model?"),
        ("zzzzqqq=2", "zzzzqqq=2: unknown key; gpipe train --help lists the keys"),
        ("command=eval", "command=eval: unknown key; gpipe train --help lists the keys"),
        ("dataset.mean.0=1", "dataset.mean.0=1: unknown key; did you mean dataset.mean?"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_one(words: str, line: str) -> None:
    assert refusal(words) == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "model=amobanet",
            f"model=amobanet: choose one of {CHOICES['model']}; did you mean amoebanet?",
        ),
        ("model=null", f"model=null: choose one of {CHOICES['model']}"),
        ("dataset={}", f"dataset={{}}: choose one of {DATASETS}"),
        (
            "lr_schedule=[step]",
            f"lr_schedule=[step]: choose one of {CHOICES['lr_schedule']}; did you mean step?",
        ),
        ("+model=amoebanet", "+model=amoebanet: write model=amoebanet, without the +"),
        ("+partitions=2", "+partitions=2: the key exists; write partitions=2, without the +"),
        (
            "dataset.name=folder",
            f"dataset.name=folder: choose by dataset=NAME, one of {DATASETS}",
        ),
        ("optimizer.name=lamb", f"optimizer.name=lamb: choose by optimizer=NAME, one of {CHOICES['optimizer']}"),
        (
            "optimizer=timm",
            "optimizer.name=null: needs text: timm's name of the optimizer; "
            "any of them with optimizer=timm optimizer.name=NAME",
        ),
    ],
)
def test_a_wrong_choice_of_a_group_is_refused_with_the_choices(words: str, line: str) -> None:
    assert refusal(*words.split()) == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "dataset.path=photos",
            f"dataset.path=photos: dataset=digits does not use it; it belongs to {WITH_A_PATH}",
        ),
        ("model.factory=a:b", "model.factory=a:b: model=amoebanet does not use it; it belongs to model=module"),
        ("model.kwargs.x=1", "model.kwargs.x=1: model=amoebanet does not use it; it belongs to model=module"),
        (
            "lr_schedule=constant lr_schedule.decay_rate=0.5",
            "lr_schedule.decay_rate=0.5: lr_schedule=constant does not use it; "
            "it belongs to lr_schedule=exponential, lr_schedule=step",
        ),
        (
            "experiment=imagenet_short lr_schedule=cosine",
            "lr_schedule.decay_rate=0.88: the experiment sets it, but lr_schedule=cosine does not use it; "
            "choose lr_schedule=exponential or lr_schedule=step, or leave the experiment out",
        ),
    ],
)
def test_a_setting_that_the_choice_would_ignore_is_refused(words: str, line: str) -> None:
    assert refusal(*words.split()) == line


def test_a_setting_that_refers_to_nothing_is_refused_in_one_line() -> None:
    assert refusal("seed=${nope}") == "cannot read the settings: Interpolation key 'nope' not found"
    assert refusal("run_dir=???") == "cannot read the settings: Missing mandatory value: run_dir"


@pytest.mark.parametrize(
    "word", ["optimizer.options.alpha=0.95", "+optimizer.options.alpha=0.95", "optimizer.options={alpha:0.95}"]
)
def test_free_form_settings_take_any_key_with_and_without_plus(word: str) -> None:
    assert load("train", ["optimizer=adamw", word]).optimizer.options == {"alpha": 0.95}


def test_a_whole_free_form_setting_replaces_the_one_in_the_file() -> None:
    assert load("train", ["optimizer=rmsprop", "optimizer.options={eps:0.1}"]).optimizer.options == {"eps": 0.1}
    assert load("train", ["optimizer=rmsprop", "optimizer.options.eps=0.1"]).optimizer.options == {
        "alpha": 0.9,
        "eps": 0.1,
    }


def test_the_factory_of_your_own_layers_gets_its_arguments() -> None:
    model = load("train", ["model=module", "model.factory=a.b:c", "model.kwargs.width=8"]).model
    assert (model.factory, model.kwargs) == ("a.b:c", {"width": 8})


def test_image_size_comes_from_the_data_set_unless_it_is_set() -> None:
    assert load("train", ["dataset=cifar10"]).image_size == 32
    assert load("train", ["dataset=cifar10", "dataset.image_size=40"]).image_size == 40
    assert load("train", ["dataset=cifar10", "image_size=48"]).image_size == 48
    assert refusal("image_size=48", "dataset.image_size=40") == (
        "dataset.image_size=40: image_size=48 says otherwise; give one of them"
    )


def test_a_pair_with_a_recipe_gets_it_and_the_command_line_wins() -> None:
    pair = ["model=amoebanet_b", "dataset=imagenet"]
    recipe = load("train", pair)
    assert (recipe.optimizer.name, recipe.lr_schedule.name, recipe.partitions) == ("rmsproptf", "exponential", 4)
    mine = load("train", [*pair, "optimizer=sgd", "partitions=2"])
    assert (mine.optimizer.name, mine.lr_schedule.name, mine.partitions) == ("sgd", "exponential", 2)
    assert load("train", [*pair, "recipe=null"]).optimizer.name == "adamw"


def test_a_recipe_can_be_tried_on_other_data() -> None:
    dry_run = load("train", ["model=amoebanet_b", "dataset=synthetic", "recipe=imagenet_amoebanet_b", "steps=2"])
    assert (dry_run.dataset.name, dry_run.image_size, dry_run.ema_decay) == ("synthetic", 480, 0.9999)


def test_an_experiment_wins_over_its_recipe_and_the_command_line_over_both() -> None:
    short = load("train", ["experiment=imagenet_short", "epochs=30"])
    assert (short.model.layers, short.optimizer.lr, short.label_smoothing, short.epochs) == (6, 2.56, 0.1, 30)


def test_composing_writes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose("train", ["partitions=2"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["bench", "plan"])
def test_a_transformer_is_costed_with_its_own_optimizer_unless_another_is_chosen(command: str) -> None:
    assert load(command, ["model=transformer"]).optimizer.name == "adam"
    assert load(command, ["model=transformer_8b"]).optimizer.name == "adam"
    assert load(command, ["model=transformer", "optimizer=rmsprop"]).optimizer.name == "rmsproptf"
    assert load(command, []).optimizer.name == "rmsproptf"


def test_in_a_table_of_the_paper_the_transformer_is_the_papers() -> None:
    model = load("bench", ["suite=table2", "model=transformer", "model.layers=4"]).model
    assert (model.layers, model.width) == (4, 2048)
    assert load("bench", ["model=transformer"]).model.width == 128
    assert load("bench", ["suite=table2", "model=transformer_282m"]).model.layers == 3
