"""A trained network on disk, whoever wrote it: a run's checkpoint or an exported safetensors file.

`open_weights` finds it and reads what it says about itself: the settings of its run, its classes, the names and shapes
of its tensors. Tensors are read when they are asked for, and only those, so a rank never loads another one's layers.
Neither format runs code from the file: checkpoints go through `checkpoint_storage`, safetensors holds no objects, and
anything else (a pickle) is refused.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.errors import CheckpointError, ConfigError
from gpipe_cli.training.ema import PREFIX as AVERAGE

MODEL = "model/"  # of a checkpoint's keys, which training/state.py writes
FACTS = "gpipe"  # key of the file's metadata that holds the facts, as JSON
Shape = tuple[int, ...]
Accept = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class StoredWeights(ABC):
    """What is known of a network before any of its tensors is read.

    `facts`: plain JSON, "config" (settings of the run, nested), "data" ("name", "classes", ...), "step", ...
    `shapes`: of every parameter and buffer by its name in the plain nn.Sequential, "<layer>.<tensor>".
    `averaged`: names that have a moving average as well (a tied tensor under one of its names only).
    """

    path: Path
    facts: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    averaged: frozenset[str]

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the run that trained the network, as its config.yaml has them."""
        return dict(self.facts["config"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, label by label; none for text."""
        return tuple(self.facts["data"].get("classes", ()))

    @property
    def has_average(self) -> bool:
        """Whether the run kept a moving average of its weights, by which it evaluated."""
        return bool(self.averaged)

    def read(self, names: Iterable[str], *, average: bool = False) -> dict[str, Tensor]:
        """The tensors called `names`, on the CPU, by name; with `average` their moving averages.

        Raises CheckpointError for a name that is not stored, for `average` where there is none, and when the file
        has been damaged or removed since it was opened.
        """
        wanted = list(names)
        missing = sorted(set(wanted) - self.shapes.keys())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(self.path, f"lacks {missing[0]}{more}: it was written for another model")
        if not average:
            return self._read(wanted, average=False)
        if not self.averaged:
            raise CheckpointError(self.path, "holds no moving average: its run had ema_decay=0")
        source = {name: name if name in self.averaged else self._tied_to(name) for name in wanted}
        tensors = self._read(sorted(set(source.values())), average=True)
        return {name: tensors[source[name]] for name in wanted}

    def _tied_to(self, name: str) -> str:
        """The name under which the average of a tied tensor is stored: that of the same shape and the same weights."""
        layer = name.partition(".")[0]  # layers that share a parameter have copies of their own, and averages
        candidates = [other for other in self.averaged if other.partition(".")[0] == layer]
        candidates = [other for other in candidates if self.shapes[other] == self.shapes[name]]
        own = self._read([name], average=False)[name]
        for other in sorted(candidates):
            if torch.equal(own, self._read([other], average=False)[other]):
                return other
        raise CheckpointError(self.path, f"lacks the moving average of {name}")

    @abstractmethod
    def _read(self, names: list[str], *, average: bool) -> dict[str, Tensor]:
        """Tensors that are known to be stored."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights(StoredWeights):
    """A checkpoint that `training/state.py` has written."""

    def _read(self, names: list[str], *, average: bool) -> dict[str, Tensor]:
        from gpipe_cli.training import checkpoints

        prefix = AVERAGE if average else MODEL
        stored = checkpoints.load(self.path, [prefix + name for name in names])
        return {name: stored[prefix + name] for name in names}


@dataclass(frozen=True, kw_only=True)
class SafetensorsWeights(StoredWeights):
    """A file that `gpipe eval export=FILE` has written: one set of weights, the average where the run had one."""

    def _read(self, names: list[str], *, average: bool) -> dict[str, Tensor]:
        assert not average  # `averaged` is empty
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt", device="cpu") as file:
                return {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(self.path, f"cannot be read: {_reason(error)}") from error


def open_weights(checkpoint: str | Path, *, results_dir: str | Path = "results") -> StoredWeights:
    """The network that a user means by `checkpoint`, without any of its tensors.

    A run directory (its newest whole checkpoint), a checkpoint, a safetensors file that gpipe exported, or "auto": the
    newest whole checkpoint of all runs below `results_dir`.

    Raises ConfigError, one line about the key `checkpoint`, for what is missing, damaged or not gpipe's.
    """
    if str(checkpoint) == "auto":
        newest = find_newest(results_dir)
        if newest is None:
            problem = f"no run below {Path(results_dir) / 'runs'} has a whole checkpoint; gpipe train makes one"
            raise ConfigError("checkpoint", "auto", f"{problem}, or name a run directory")
        return open_weights(newest)
    path = Path(checkpoint).expanduser()
    try:
        if not path.exists():
            raise CheckpointError(path, "no such run directory, checkpoint or safetensors file")
        return _open_file(path) if path.is_file() else _open_checkpoint(path)
    except CheckpointError as error:
        where = "" if Path(error.path) == path else f"{error.path}: "
        raise ConfigError("checkpoint", checkpoint, f"{where}{error.problem}") from error


def find_newest(results_dir: str | Path, accept: Accept | None = None) -> Path | None:
    """The whole checkpoint that was written last among the runs below `results_dir`, or None.

    `accept`: asked with the settings of a run whether its network will do. Runs that cannot be read are passed over.
    """
    from gpipe_cli.training import checkpoints

    found = []
    runs = Path(results_dir) / "runs"
    for directory in (*runs.glob("*/checkpoints"), *runs.glob("*/seed-*/checkpoints")):
        try:
            path = checkpoints.find_latest(directory)
            if path is not None and (accept is None or accept(checkpoints.load_facts(path)["config"])):
                found.append((path.stat().st_mtime_ns, path))
        except (CheckpointError, KeyError, OSError):  # damaged, or removed by its run meanwhile
            continue
    return max(found)[1] if found else None


def _open_checkpoint(path: Path) -> StoredWeights:
    from gpipe_cli.training import checkpoint_storage, checkpoints

    path = checkpoints.resolve(path)
    facts = _checked(path, checkpoints.load_facts(path))
    stored = checkpoint_storage.read_metadata(path).state_dict_metadata
    sizes = {key: tuple(getattr(one, "size", ())) for key, one in stored.items() if key.startswith((MODEL, AVERAGE))}
    return CheckpointWeights(
        path=path,
        facts=facts,
        shapes={key.removeprefix(MODEL): size for key, size in sizes.items() if key.startswith(MODEL)},
        averaged=frozenset(key.removeprefix(AVERAGE) for key in sizes if key.startswith(AVERAGE)),
    )


def _open_file(path: Path) -> StoredWeights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        problem = (
            f"not a safetensors file ({_reason(error)}); of other files gpipe reads none, pickles can run any code"
        )
        raise CheckpointError(path, problem) from error
    try:
        facts = json.loads(metadata[FACTS])
    except (KeyError, ValueError) as error:
        problem = "says nothing of its network: name a file that gpipe eval export=FILE has written"
        raise CheckpointError(path, problem) from error
    return SafetensorsWeights(path=path, facts=_checked(path, facts), shapes=shapes, averaged=frozenset())


def _checked(path: Path, facts: Any) -> dict[str, Any]:
    groups = ("config", "data")
    if not isinstance(facts, dict) or not all(isinstance(facts.get(group), dict) for group in groups):
        raise CheckpointError(path, "damaged: the settings of its run are not in it")
    if not all(isinstance(facts["config"].get(group), dict) for group in ("model", "dataset")):
        raise CheckpointError(path, "damaged: the settings of its run lack the model or the dataset")
    return dict(facts)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:120]
