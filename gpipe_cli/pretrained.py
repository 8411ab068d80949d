"""The network of a checkpoint, as settings: who names a checkpoint need not describe its network again.

Reads JSON and YAML only, no tensor and no torch. What cannot be read is left to those who load the weights: they say
what is wrong with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from gpipe_cli.catalogue import compose_file, group_choices, keys_of_choice
from gpipe_cli.config import stem_for
from gpipe_cli.config_transfer import AUTO, SCRATCH
from gpipe_cli.errors import ConfigError
from gpipe_cli.overrides import Setting
from gpipe_cli.reporting.run_directory import read_config

_SAFETENSORS_HEADER = struct.Struct("<Q")  # the file begins with the length of its JSON header
_LONGEST_HEADER = 100 * 2**20  # as the safetensors library allows


def network_words(settings: Sequence[Setting]) -> list[str]:
    """`key=value` words for the network of the checkpoint that `settings` name, to be put before what was typed.

    None for a run that is resumed, and where the model is typed, or no checkpoint is named.
    """
    typed = {setting.key: setting.value for setting in settings}
    named = typed.get("checkpoint", AUTO)
    if typed.get("resume") is not None or "model" in typed or named in (None, AUTO, SCRATCH):
        return []
    stored = stored_settings_of(Path(str(named)).expanduser())
    model = stored.get("model") if stored is not None else None
    if stored is None or not isinstance(model, Mapping):
        return []
    choice = _choice(model)
    if choice is None:
        return []
    values = {key: model[key] for key in sorted(keys_of_choice("model", choice) & model.keys()) if key != "name"}
    if isinstance(stored.get("image_size"), int) and "stem" in values:
        values["stem"] = stem_for(values["stem"], stored["image_size"])
    return [f"model={choice}", *(f"model.{key}={_in_hydras_syntax(value)}" for key, value in values.items())]


def stored_settings_of(path: Path) -> Mapping[str, Any] | None:
    """The settings of the run that wrote the checkpoint, or of the run folder; None where there are none to read."""
    try:
        if path.is_file():
            facts = json.loads(json.loads(_header(path))["__metadata__"]["gpipe"])
        elif (path / "facts.json").is_file():
            facts = json.loads((path / "facts.json").read_text(encoding="utf-8"))["facts"]
        else:
            folders = [path, path.parent] if path.name == "checkpoints" else [path]
            facts = {"config": next((found for folder in folders if (found := read_config(folder))), None)}
        config = facts["config"]
    except (OSError, ValueError, KeyError, TypeError, struct.error, ConfigError):
        return None
    return config if isinstance(config, Mapping) else None


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        (length,) = _SAFETENSORS_HEADER.unpack(file.read(_SAFETENSORS_HEADER.size))
        return file.read(min(length, _LONGEST_HEADER))


def _choice(model: Mapping[str, Any]) -> str | None:
    """The file of conf/model/ for a network: the preset that has its sizes, else that of its kind."""
    kind = model.get("name")
    for choice in group_choices()["model"]:
        preset = compose_file("train", (f"model={choice}",)).config.model
        sizes = keys_of_choice("model", choice) & {"name", "variant", "layers", "filters"}
        if len(sizes) > 1 and all(preset.get(key) == model.get(key) for key in sizes):
            return choice
    return str(kind) if kind in group_choices()["model"] else None


def _in_hydras_syntax(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return str(QuotedString(text=value, quote=Quote.single).with_quotes())
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_in_hydras_syntax(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_in_hydras_syntax, value)) + "]"
    return repr(value)
