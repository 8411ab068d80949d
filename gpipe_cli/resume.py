"""Going on with a run: the settings that it was started with, and what was typed on top of them.

No torch here: which checkpoint is whole is decided later, by those who read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpipe_cli.catalogue import group_choices
from gpipe_cli.errors import ConfigError, as_typed
from gpipe_cli.overrides import Setting
from gpipe_cli.reporting.run_directory import read_config

# What makes a run the run it is: changing it would be another training under the old one's name.
FIXED = ("command", "model", "seed", "batch_size", "checkpoint", "seeds")
# Groups that set keys of others, and leave no trace of their own in a run's config.yaml.
_OVERLAYS = ("recipe", "experiment")


def stored_settings(composed: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """The settings of the run that `resume` names, with the typed `settings` put over them.

    Raises ConfigError when there is no such run, or when what was typed would make it another one.
    """
    run_dir = _find_run(composed)
    stored = read_config(run_dir)
    if stored is None:
        raise ConfigError("resume", composed["resume"], f"{run_dir} holds no config.yaml: name a run folder of gpipe")
    if stored.get("command") != composed["command"]:
        again = f"gpipe {stored.get('command')} resume={composed['resume']} goes on with it"
        remedy = again if stored.get("command") in ("train", "transfer") else "name a run that trains"
        raise ConfigError("resume", composed["resume"], f"is a run of gpipe {stored.get('command')}; {remedy}")
    merged = _merged(stored, composed, settings)
    refuse_another_run(str(composed["resume"]), stored, merged)
    typed = {setting.key for setting in settings}
    named = str(composed["resume"])
    merged["resume"] = named if named != "auto" else str(run_dir)
    merged["run_dir"] = composed["run_dir"] if "run_dir" in typed else str(run_dir)
    return merged


def choices_of_run(settings: Sequence[Setting]) -> list[str]:
    """`group=choice` for the groups that the run named by `resume` has and `settings` leaves out.

    With them a key of the run's own choice (`dataset.size` of dataset=synthetic) can be typed alone. Empty for
    resume=auto, which looks for the run by the choices. Raises ConfigError when there is no such run, or when an
    experiment or recipe is laid over it.
    """
    typed = {setting.key: setting.value for setting in settings}
    if typed.get("resume") is None:
        return []
    for group in _OVERLAYS:
        if typed.get(group) is not None:
            problem = f"a resumed run keeps its settings; leave {group} out, and type the keys that are to change"
            raise ConfigError(group, typed[group], problem)
    if typed["resume"] == "auto":
        return []
    stored = read_config(_find_run(typed)) or {}
    words = []
    for group, choices in group_choices().items():
        name = stored[group].get("name") if isinstance(stored.get(group), dict) else None
        if name is not None and group not in typed:
            # The optimizers' files have short names, and one of them takes any of timm's.
            choice = {"rmsproptf": "rmsprop"}.get(name, name)
            words.append(f"{group}={choice if choice in choices else 'timm'}")
    return words


def refuse_another_run(resume: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError when the settings `now` would not go on with the run that had the settings `stored`.

    `stored` is a run's config.yaml or a checkpoint's facts. Besides what is fixed, whatever the optimizer and the
    average of the weights keep must fit what the checkpoint holds of them.
    """

    def refuse(key: str, was: object, wanted: object) -> None:
        problem = f"the run has {key}={as_typed(was)}, not {as_typed(wanted)}; start a new run for that"
        raise ConfigError("resume", resume, problem)

    for key in FIXED:
        if _plain(stored.get(key)) != _plain(now.get(key)):
            refuse(*_difference(key, stored.get(key), now.get(key)))
    before, after = stored.get("optimizer", {}), now["optimizer"]
    if before.get("name") != after["name"]:
        refuse("optimizer.name", before.get("name"), after["name"])
    if bool(before.get("momentum")) != bool(after["momentum"]):
        refuse("optimizer.momentum", before.get("momentum"), after["momentum"])
    options = {**before.get("options", {}), **after["options"]}
    for name in options:
        was, wanted = before.get("options", {}).get(name), after["options"].get(name)
        if was != wanted and (isinstance(was, bool) or isinstance(wanted, bool)):  # amsgrad: other state is kept
            refuse(f"optimizer.options.{name}", was, wanted)
    if now["ema_decay"] and not stored.get("ema_decay"):
        refuse("ema_decay", stored.get("ema_decay"), now["ema_decay"])


def _merged(stored: Mapping[str, Any], composed: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    merged = dict(stored)
    typed = {setting.key for setting in settings}
    for setting in settings:
        group, _, name = setting.key.partition(".")
        if group in _OVERLAYS:  # refused, or null
            continue
        if setting.key in group_choices():
            # A preset (amoebanet_b) names a network by its sizes, the plain choice only says which kind it is.
            preset = group == "model" and setting.value != composed[group]["name"]
            if preset or merged[group].get("name") != composed[group]["name"]:
                merged[group] = composed[group]
        elif name:
            merged[group] = {**merged[group], name.split(".")[0]: composed[group][name.split(".")[0]]}
        else:
            merged[group] = composed[group]
    if "dataset.image_size" in typed and "image_size" not in typed:
        merged["image_size"] = composed["image_size"]
    if "partitions" in typed and merged["partitions"] != stored["partitions"]:
        # The cut and the processes of another number of partitions do not fit; they have no influence on the result.
        merged |= {key: None for key in ("balance", "ranks") if key not in typed}
    if merged.get("remat") != "auto" and "memory_gb" not in typed:
        merged["memory_gb"] = None  # the budget of another remat
    return merged


def changed_settings(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for every setting that differs from the run so far, `key: old -> new`."""
    quiet = {"resume", "run_dir", "epochs", "steps"}  # said by the run itself
    lines = []
    for key, value in now.items():
        before = stored.get(key)
        if key in quiet or _plain(before) == _plain(value):
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            lines += [f"{key}.{line}" for line in changed_settings(before, value)]
        else:
            lines.append(f"{key}: {as_typed(before)} -> {as_typed(value)}")
    return lines


def _find_run(composed: Mapping[str, Any]) -> Path:
    resume = str(composed["resume"])
    if resume == "auto":
        return _newest_run(composed)
    path = Path(resume)
    if not path.exists():
        raise ConfigError("resume", resume, "there is no such run folder or checkpoint")
    for folder in (path, *path.resolve().parents[:2]):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError("resume", resume, "holds no run: name a run folder (with config.yaml) or a checkpoint in one")


def _newest_run(composed: Mapping[str, Any]) -> Path:
    runs = Path(composed["results_dir"]) / "runs"
    found = []
    for folder in runs.iterdir() if runs.is_dir() else ():
        stored = read_config(folder)
        holds_runs = any(any(folder.glob(f"{place}checkpoints/step-*")) for place in ("", "seed-*/"))
        if stored is not None and holds_runs:
            same = all(stored.get(group, {}).get("name") == composed[group]["name"] for group in ("model", "dataset"))
            if same and stored.get("command") == composed.get("command", "train"):
                found.append(((folder / "config.yaml").stat().st_mtime, folder))
    if not found:
        kind = f"model={composed['model']['name']} dataset={composed['dataset']['name']}"
        raise ConfigError("resume", "auto", f"no run of {kind} with a checkpoint below {runs}; leave resume out")
    return max(found)[1]


def _difference(key: str, stored: object, now: object) -> tuple[str, object, object]:
    """The first key below `key` whose values differ, and both of them."""
    if isinstance(stored, Mapping) and isinstance(now, Mapping):
        for name in now:
            if stored.get(name) != now[name]:
                return f"{key}.{name}", stored.get(name), now[name]
    return key, stored, now


def _plain(value: object) -> object:
    """Tuples and lists say the same."""
    return list(value) if isinstance(value, tuple) else value
