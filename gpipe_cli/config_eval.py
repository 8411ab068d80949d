"""The settings of `gpipe eval`, and how they change those of the run that the checkpoint comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpipe_cli.checks import check_together
from gpipe_cli.config import DatasetConfig, TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.fields import about, did_you_mean, read, setting

Split = Literal["train", "eval"]
# What makes another network, or other labels, of a run's data set.
_FIXED_OF_DATASET = ("name", "num_classes", "image_size")
_OF_PROMPT = {"num_tokens": 200, "temperature": 0.8, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """`gpipe eval`: what to do with a checkpoint, and what is to differ from its run."""

    command: str = setting("the command that runs")
    checkpoint: str = setting(
        "a run folder, a checkpoint, or a safetensors file that gpipe exported; auto: the newest of all runs"
    )
    weights: Literal["auto", "average", "raw"] = setting(
        "average: the moving average of the weights; raw: the weights as the last step left them; "
        "auto: the average if the run kept one"
    )
    split: Literal["auto", "eval", "train", "none"] = setting(
        "which samples are evaluated; auto: the held-out ones, none with export or prompt"
    )
    export: str | None = setting("write the weights into this safetensors file, for a plain nn.Sequential")
    prompt: str | None = setting("a text that a language model is to go on with")
    num_tokens: int = setting("tokens to write after the prompt", at_least=1)
    temperature: float = setting(
        "0: the likeliest token; 1: drawn as the model says; less: surer, more: bolder", at_least=0
    )
    seed: int = setting("seed of the continuation's draws", at_least=0, below=2**32)
    dataset: dict[str, Any] = field(
        metadata=about("settings of the run's data set to change: dataset.path=FOLDER, dataset.eval_split=test")
    )
    partitions: int | None = setting("parts that the network is cut into; null: as the run", at_least=1)
    micro_batches: int | None = setting("parts of a batch; null: as the run", at_least=1)
    batch_size: int | None = setting("samples that are evaluated at a time; null: as the run", at_least=1)
    balance: tuple[int, ...] | None = setting(
        "layers in each partition, [5,4]; null: as the run, or by cost", at_least=1
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto: GPUs when there are any, else the CPU")
    precision: Literal["fp32", "bf16"] | None = setting("bf16: automatic mixed precision; null: as the run")
    ranks: int | None = setting("processes; null: one per partition on CPU, at most one per GPU on CUDA", at_least=1)
    threads: int | None = setting("CPU threads of each rank; null: the cores shared out", at_least=1)
    workers: int | None = setting("processes that load data; null: as the run", at_least=0)
    results_dir: str = setting("folder with runs/, where auto looks and the results go")
    run_dir: str | None = setting("folder of the results; null: a new one below results_dir/runs")
    progress: Literal["auto", "bar", "plain", "none"] = setting("auto: a bar on a terminal, else plain lines")

    @property
    def evaluated_split(self) -> Split | None:
        """The split that is evaluated, if any."""
        if self.split == "auto":
            return "eval" if self.export is None and self.prompt is None else None
        return None if self.split == "none" else self.split

    def check(self) -> None:
        """Raises ConfigError for the first pair of settings in conflict."""
        if self.export is not None and not self.export.endswith(".safetensors"):
            problem = "the file is written in the safetensors format; give it a name that ends in .safetensors"
            raise ConfigError("export", self.export, problem)
        if self.split == "none" and self.export is None and self.prompt is None:
            raise ConfigError("split", "none", "leaves nothing to do; use split=eval or train, or add export=FILE")
        for key, default in _OF_PROMPT.items():
            if self.prompt is None and getattr(self, key) != default:
                raise ConfigError(key, getattr(self, key), "is for prompt=TEXT; add a prompt, or leave it out")
        if self.run_dir is not None and self.evaluated_split is None:
            raise ConfigError("run_dir", self.run_dir, "holds the results of an evaluation; add split=eval")


def run_settings(stored: Mapping[str, Any], own: EvalConfig, where: object) -> TrainConfig:
    """The settings of the run that were `stored`, with those of `own` in their place, checked.

    `where`: the checkpoint as the user named it, for what is wrong with it. Raises ConfigError for a setting of the
    data set that does not exist or may not change, for a conflict, and for a checkpoint that lacks settings.
    """
    names = {one.name for one in dataclasses.fields(TrainConfig)}
    values = {
        key: value for key, value in stored.items() if key in names
    }  # other commands' runs have keys of their own
    values |= {"command": own.command, "dataset": _dataset(stored["dataset"], own.dataset)}
    values |= {
        "device": own.device,
        "ranks": own.ranks,
        "threads": own.threads,
        "cut": "flops",
        "results_dir": own.results_dir,
        "run_dir": own.run_dir,
        "progress": own.progress,
        # Of training; nothing of them is used.
        "resume": None,
        "tensorboard": False,
        "replicas": 1,
        # Evaluation runs forward only, and none of these has any influence on it.
        "schedule": "gpipe",
        "remat": "none",
        "memory_gb": None,
    }
    if own.partitions is not None and own.partitions != stored.get("partitions"):
        values |= {"partitions": own.partitions, "balance": None}
    for key in ("micro_batches", "balance", "precision", "workers"):
        if getattr(own, key) is not None:
            values[key] = getattr(own, key)
    if own.batch_size is not None:
        values["eval_batch_size"] = own.batch_size
    try:
        config = read(TrainConfig, values)
    except ConfigError as error:
        if getattr(own, str(error.key).partition(".")[0], None):
            raise
        problem = f"its settings are not those of this version of gpipe: {error}"
        raise ConfigError("checkpoint", where, problem) from error
    check_together(config)
    return config


def _dataset(stored: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    names = [one.name for one in dataclasses.fields(DatasetConfig)]
    for key, value in typed.items():
        if key not in names:
            raise ConfigError(f"dataset.{key}", value, f"unknown key{did_you_mean(key, names)}")
        if key in _FIXED_OF_DATASET and value != stored.get(key):
            raise ConfigError(f"dataset.{key}", value, "the checkpoint says it; leave it out, or train anew")
    return {**stored, **typed}
