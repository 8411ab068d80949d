"""What can be set: the groups and files of `conf/`, and the keys that the config dataclasses declare."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from importlib import resources
from typing import Any

import hydra
import yaml
from omegaconf import DictConfig, open_dict

from gpipe_cli.config import TrainConfig, config_class

CONFIG_PACKAGE = "gpipe_cli.conf"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Composed:
    """A composed configuration, unresolved, and the choice of every group that led to it. Not to be changed."""

    config: DictConfig
    choices: dict[str, str | None]


@functools.lru_cache(maxsize=256)  # Hydra needs 50 ms for each, and a command asks for the same ones again
def compose_file(config_name: str, overrides: tuple[str, ...] = ()) -> Composed:
    """A file of conf/ composed by Hydra."""
    with hydra.initialize_config_module(CONFIG_PACKAGE, job_name="gpipe", version_base="1.3"):
        config = hydra.compose(config_name, overrides=list(overrides), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return Composed(config=config, choices=choices)


@functools.cache
def group_choices(command: str = "train") -> dict[str, tuple[str, ...]]:
    """The groups that the root file of `command` has, each with the names of its files in conf/."""
    own = _groups_of_root(command)
    return {group: choices for group, choices in _all_groups().items() if group in own}


def _groups_of_root(name: str) -> frozenset[str]:
    """Groups in the defaults list of conf/<name>.yaml and of the root files that it is made from."""
    root = yaml.safe_load((resources.files(CONFIG_PACKAGE) / f"{name}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in root.get("defaults", []) if entry != "_self_"]
    own = {group for entry in entries if isinstance(entry, dict) for group in entry}
    return frozenset(own).union(*(_groups_of_root(entry) for entry in entries if isinstance(entry, str)))


@functools.cache
def _all_groups() -> dict[str, tuple[str, ...]]:
    return {
        folder.name: tuple(
            sorted(file.name[: -len(".yaml")] for file in folder.iterdir() if file.name.endswith(".yaml"))
        )
        for folder in sorted(resources.files(CONFIG_PACKAGE).iterdir(), key=lambda entry: entry.name)
        if folder.is_dir() and not folder.name.startswith("_")
    }


@functools.cache
def keys_of_choice(group: str, choice: str) -> frozenset[str]:
    """Keys of conf/<group>/<choice>.yaml and of the files that its defaults list names."""
    content = yaml.safe_load((resources.files(CONFIG_PACKAGE) / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    content.pop("defaults", None)
    return frozenset(content).union(*(keys_of_choice(group, base) for base in bases_of_choice(group, choice)))


@functools.cache
def bases_of_choice(group: str, choice: str) -> tuple[str, ...]:
    """The files of the group that conf/<group>/<choice>.yaml is made from, in the order of its defaults list."""
    content = yaml.safe_load((resources.files(CONFIG_PACKAGE) / group / f"{choice}.yaml").read_text(encoding="utf-8"))
    return tuple(base for base in content.get("defaults", []) if isinstance(base, str) and base != "_self_")


def choices_with_key(group: str, key: str) -> tuple[str, ...]:
    """Choices of a group to which a setting applies: those whose file has the key, but for what is made from them."""
    having = [choice for choice in _all_groups()[group] if key in keys_of_choice(group, choice)]
    return tuple(choice for choice in having if not set(bases_of_choice(group, choice)) & set(having))


def typed_keys(cls: type = TrainConfig, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], object]]:
    """(dotted key, field, type) of every setting, group by group, whether or not the chosen files have it."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from typed_keys(hints[field.name], f"{prefix}{field.name}.")
        elif field.name != "command":
            yield prefix + field.name, field, hints[field.name]


def free_form_keys(command: str) -> tuple[str, ...]:
    """Mappings that take any key: arguments of someone else's function, settings of a run that is not read yet."""
    return tuple(key for key, _, hint in typed_keys(config_class(command)) if typing.get_origin(hint) is dict)


def text_keys(command: str = "train") -> frozenset[str]:
    """Keys whose value is any text, such as a path: what Hydra's grammar cannot read is taken as it stands."""
    return frozenset(key for key, _, hint in typed_keys(config_class(command)) if hint in (str, str | None))
