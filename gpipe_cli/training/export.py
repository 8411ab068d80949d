"""A trained network as one safetensors file, for whoever has the layers: no gpipe, no pickle, no pieces.

Names are those of the plain nn.Sequential of the named layers, so that it loads the file strictly. What else there is
to know stands in the file's metadata, as JSON texts:

    model      the settings of the network, as in config.yaml
    arguments  of the function that returns its layers (where that could be found)
    classes    class names, label by label
    input      what a picture must look like: size, mean and standard deviation of its pixels in 0..1
    gpipe      what `gpipe eval checkpoint=FILE` needs: the run's settings, its data, steps, which weights these are
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.errors import ConfigError, TrainingError
from gpipe_cli.reporting.atomic import replace_file
from gpipe_cli.training.networks import network_arguments
from gpipe_cli.training.weights import FACTS, StoredWeights

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig

# Of the run that made the weights, not of the weights: where it wrote on that machine.
_LOCAL = ("results_dir", "run_dir", "resume", "checkpoint")
_LOCAL_OF_DATASET = ("path", "cache")  # unless they are relative


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    num_tensors: int
    num_bytes: int


def check_can_be_written(path: Path) -> None:
    """Raise ConfigError now, not after a long reading, when `path` names no file that can be made."""
    if path.is_dir():
        raise ConfigError("export", path, "is a folder; name a file")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise ConfigError("export", path, f"{nearest} is a file; name another folder")


def export_weights(stored: StoredWeights, config: TrainConfig, path: Path, *, average: bool) -> Exported:
    """Write all weights of `stored`, or with `average` their moving averages, to `path`: whole, or not at all.

    `config`: the settings of the run. Raises TrainingError when the file cannot be written, CheckpointError as
    `StoredWeights.read`.
    """
    from safetensors.torch import save_file

    # The format refuses tensors that share memory, as averages of tied tensors do.
    tensors = {name: tensor.clone() for name, tensor in stored.read(stored.shapes, average=average).items()}
    metadata = _metadata(stored, config, average=average)
    try:
        replace_file(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
    except Exception as error:
        # The library reports a full disk in a class of its own.
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise TrainingError(f"{path}: cannot be written: {reason}") from error
    return Exported(path=path, num_tensors=len(tensors), num_bytes=path.stat().st_size)


def _metadata(stored: StoredWeights, config: TrainConfig, *, average: bool) -> dict[str, str]:
    described: dict[str, Any] = {
        "model": stored.config["model"],
        "arguments": _arguments(stored, config),
        "classes": stored.classes,
        "input": _input(config),
        FACTS: {**stored.facts, "config": _without_paths(stored.config), "weights": which_weights(stored, average)},
    }
    texts = {key: json.dumps(value) for key, value in described.items() if value is not None}
    return {"format": "pt", **texts}


def which_weights(stored: StoredWeights, average: bool) -> str:
    """ "average" or "raw": of an exported file what it says itself."""
    return str(stored.facts.get("weights", "average" if average else "raw"))


def _arguments(stored: StoredWeights, config: TrainConfig) -> dict[str, Any] | None:
    try:
        return network_arguments(config.model, len(stored.classes), config.image_size)
    except ConfigError:  # the user's module is elsewhere; its weights can be exported all the same
        return None


def _input(config: TrainConfig) -> dict[str, Any] | None:
    if config.image_size is None:
        return None
    return {"image_size": config.image_size, "mean": config.dataset.mean, "std": config.dataset.std}


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without this machine's folders, which are nobody's business and of no use elsewhere."""
    dataset = {
        key: value
        for key, value in config["dataset"].items()
        if key not in _LOCAL_OF_DATASET or not isinstance(value, str) or not Path(value).is_absolute()
    }
    kept = {key: value for key, value in config.items() if key not in _LOCAL}
    return {**kept, "dataset": dataset}
