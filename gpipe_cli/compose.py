"""From command-line words to a checked configuration, through Hydra's compose API: nothing is written anywhere.

Composed twice: first with the group choices alone, which tells what keys exist, then with every setting.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.catalogue import (
    Composed,
    bases_of_choice,
    choices_with_key,
    compose_file,
    free_form_keys,
    group_choices,
    keys_of_choice,
    text_keys,
    typed_keys,
)
from gpipe_cli.config import config_class, from_hydra
from gpipe_cli.errors import ConfigError
from gpipe_cli.fields import did_you_mean
from gpipe_cli.overrides import Setting, parse_settings
from gpipe_cli.pretrained import network_words
from gpipe_cli.resume import choices_of_run, stored_settings

OPTIONAL_GROUPS = ("recipe", "experiment", "suite")  # `null` chooses none
DEFAULT_DATASETS = {"transformer": "text"}  # by model.name: what a network is trained on when no data set is chosen
DEFAULT_OPTIMIZERS = {"transformer": "adam"}  # by model.name, PAPER 7's: for bench and plan; recipes choose for train
PAPERS_OWN = {"transformer": "transformer_48"}  # by model: the network that a table of the paper means by this name
DEFAULT_MODELS = {"text": "transformer"}  # by data set: what is trained on it when no network is chosen


def load(command: str, words: Sequence[str]) -> Any:
    """Typed configuration of `command` with the `key=value` words; `resume` brings the settings of its run.

    Raises ConfigError in one line.
    """
    settings = parse_settings(words, text_keys(command))
    composed = compose(command, [*choices_of_run(settings), *words])
    if composed.get("resume") is not None:
        composed = stored_settings({**composed, "command": command}, settings)
    return from_hydra(command, composed)


def compose(command: str, words: Sequence[str]) -> dict[str, Any]:
    """The composed and resolved configuration as a plain dict; `command` names the root file in conf/."""
    settings = parse_settings(words, text_keys(command))
    if command == "transfer" and (network := network_words(settings)):
        settings = parse_settings([*network, *words], text_keys(command))
    groups = group_choices(command)
    chosen = {setting.key: _choice(setting, groups[setting.key]) for setting in settings if setting.key in groups}
    overrides, chosen_only = _choose(command, chosen)
    choices = chosen_only.choices
    known = _own_keys(command, dict(_dotted(chosen_only.config)))
    for setting in settings:
        if setting.key not in groups:
            overrides += _key_overrides(command, setting, known, choices)
    _check_one_image_size(settings)
    try:
        config = compose_file(command, tuple(overrides)).config
        composed: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(None, None, f"cannot read the settings: {str(error).splitlines()[0]}") from None
    _check_belongs(command, composed, choices)
    return _own_keys(command, composed)


def resolved_yaml(command: str, words: Sequence[str]) -> str:
    """The composed configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(compose(command, words)))


def _choose(command: str, chosen: Mapping[str, str | None]) -> tuple[list[str], Composed]:
    """Overrides for the groups, with the network's data set and the recipe of the pair, and what they compose to."""
    if chosen.get("suite") is not None and chosen.get("model") in PAPERS_OWN:
        chosen = {**chosen, "model": PAPERS_OWN[str(chosen["model"])]}
    overrides = [f"{group}={name}" for group, name in chosen.items() if name is not None]
    if "model" not in group_choices(command):  # a checkpoint brings it
        return overrides, compose_file(command, tuple(overrides))
    model = DEFAULT_MODELS.get(str(chosen.get("dataset")))
    if model is not None and "model" not in chosen:
        overrides.append(f"model={model}")
    composed = compose_file(command, tuple(overrides))
    dataset = DEFAULT_DATASETS.get(composed.config.model.name)
    if dataset is not None and "dataset" in composed.choices and "dataset" not in chosen:
        overrides.append(f"dataset={dataset}")
        composed = compose_file(command, tuple(overrides))
    optimizer = DEFAULT_OPTIMIZERS.get(composed.config.model.name)
    if optimizer is not None and command in ("bench", "plan") and "optimizer" not in chosen:
        overrides.append(f"optimizer={optimizer}")
        composed = compose_file(command, tuple(overrides))
    recipe = None if "recipe" in chosen else _recipe(command, composed.choices)
    if recipe is not None:
        overrides.append(f"recipe={recipe}")
        composed = compose_file(command, tuple(overrides))
    return overrides, composed


def _recipe(command: str, choices: Mapping[str, str | None]) -> str | None:
    """DATASET_MODEL in conf/recipe/, of the model or of what it is made from: the nearest one; None where none is.

    For fine-tuning transfer_MODEL, whatever the data: what matters is the network that is begun with.
    """
    names, model = group_choices(command).get("recipe", ()), choices["model"]
    purpose = "transfer" if command == "transfer" else choices.get("dataset")
    while model is not None:
        if f"{purpose}_{model}" in names:
            return f"{purpose}_{model}"
        model = next(iter(bases_of_choice("model", model)), None)
    return None


def _choice(setting: Setting, names: tuple[str, ...]) -> str | None:
    if setting.prefix:
        raise ConfigError(
            setting.prefix + setting.key, setting.value, f"write {setting.key}={setting.text}, without the +"
        )
    if setting.value is None and setting.key in OPTIONAL_GROUPS:
        return None
    if setting.value not in names:
        problem = f"choose one of {', '.join(names)}{did_you_mean(setting.text, names)}"
        raise ConfigError(setting.key, setting.value, problem)
    return str(setting.value)


def _key_overrides(
    command: str, setting: Setting, known: Mapping[str, object], choices: Mapping[str, str | None]
) -> list[str]:
    """Hydra overrides for one checked setting. Raises ConfigError for a key that the configuration does not have."""
    key, shown = setting.key, setting.prefix + setting.key
    free_form = free_form_keys(command)
    if any(key.startswith(f"{mapping}.") and mapping in known for mapping in free_form):
        return [f"++{key}={setting.hydra_text}"]
    if key in free_form and key in known:
        if not isinstance(setting.value, dict):
            raise ConfigError(shown, setting.value, f"takes its settings one by one, {key}.KEY=VALUE")
        replaced = [f"~{key}"] if "." in key else []  # where Hydra would merge
        return [*replaced, f"++{key}={setting.hydra_text}"]
    if key not in known:
        raise ConfigError(shown, setting.value, _why_unknown(command, key, choices))
    if setting.prefix:
        raise ConfigError(shown, setting.value, f"the key exists; write {key}={setting.text}, without the +")
    group, _, name = key.partition(".")
    if name == "name" and known[key] is not None:  # optimizer=timm leaves its name open
        names = ", ".join(group_choices(command)[group])
        raise ConfigError(key, setting.value, f"choose by {group}=NAME, one of {names}")
    return [f"{key}={setting.hydra_text}"]


def _why_unknown(command: str, key: str, choices: Mapping[str, str | None]) -> str:
    all_keys = {typed_key for typed_key, _, _ in typed_keys(config_class(command))}
    base = next((mapping for mapping in free_form_keys(command) if key.startswith(f"{mapping}.")), key)
    group, _, name = base.partition(".")
    if command == "eval" and group in {field.name for field in dataclasses.fields(config_class("train"))}:
        return "is the run's, and the checkpoint brings it; leave it out"
    if base in all_keys and group in choices:
        others = ", ".join(f"{group}={choice}" for choice in choices_with_key(group, name))
        return f"{group}={choices[group]} does not use it; it belongs to {others}"
    near = _nearest_key(key, [*sorted(all_keys), *group_choices(command)])
    return f"unknown key; did you mean {near}?" if near else f"unknown key; gpipe {command} --help lists the keys"


def _nearest_key(key: str, candidates: Sequence[str]) -> str | None:
    """The key that was meant: its last part without the group, a misspelling of either, or one word of it."""
    by_name = {candidate.rpartition(".")[2]: candidate for candidate in reversed(candidates)}
    by_name.update({candidate: candidate for candidate in candidates})
    name = key.rpartition(".")[2]
    for word in (key, name):
        if near := difflib.get_close_matches(word, by_name, n=1, cutoff=0.7):
            return by_name[near[0]]
    return next((by_name[known] for known in by_name if name in known.split("_")), None)


def _check_one_image_size(settings: Sequence[Setting]) -> None:
    given = {setting.key: setting.value for setting in settings}
    if {"image_size", "dataset.image_size"} <= given.keys() and given["image_size"] != given["dataset.image_size"]:
        size = given["dataset.image_size"]
        raise ConfigError(
            "dataset.image_size", size, f"image_size={given['image_size']} says otherwise; give one of them"
        )


def _check_belongs(command: str, composed: Mapping[str, Any], choices: Mapping[str, str | None]) -> None:
    """An experiment or recipe that was written for another choice of a group must not be half ignored."""
    for group in composed.keys() & group_choices(command).keys():
        if not isinstance(composed[group], Mapping):  # a suite only says its name
            continue
        for name in composed[group].keys() - keys_of_choice(group, str(choices[group])):
            others = " or ".join(f"{group}={choice}" for choice in choices_with_key(group, name))
            problem = f"the experiment sets it, but {group}={choices[group]} does not use it; choose {others}, or leave"
            raise ConfigError(f"{group}.{name}", composed[group][name], f"{problem} the experiment out")


def _own_keys(command: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Commands share the suites: of what a suite sets at the top level, a command takes the keys that it has."""
    own = {field.name for field in dataclasses.fields(config_class(command))}
    return {key: value for key, value in values.items() if key.partition(".")[0] in own}


def _dotted(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items_ex(resolve=False):
        yield f"{prefix}{key!s}", value
        if isinstance(value, DictConfig):
            yield from _dotted(value, f"{prefix}{key!s}.")
