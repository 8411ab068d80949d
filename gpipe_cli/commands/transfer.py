"""`gpipe transfer`: `gpipe train` on other data, begun with the body of a trained network, for one or several seeds."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.commands import train
from gpipe_cli.config_transfer import AUTO, SCRATCH, TransferConfig, checkpoint_label
from gpipe_cli.distributed.rendezvous import speaks
from gpipe_cli.errors import CheckpointError, ConfigError
from gpipe_cli.reporting.run_directory import (
    check_tables_can_be_written,
    claim_run_directory,
    one_line_if_not_written,
    write_config,
)
from gpipe_cli.reporting.summary import Summary, result_lines, write_summary

if TYPE_CHECKING:
    from gpipe_cli.training.session import Session
    from gpipe_cli.training.weights import StoredWeights


@dataclass(frozen=True, kw_only=True)
class TrainedBody:
    """See `train.Start`. `stored`: None for random weights, and for a run that goes on with its own."""

    label: str
    stored: StoredWeights | None

    def prepare(self, session: Session) -> Session:
        from gpipe_cli.training.transfer import prepare

        return prepare(session)

    def load(self, session: Session) -> str | None:
        from gpipe_cli.training.transfer import load_body

        return load_body(session, self.stored) if self.stored is not None else None


def run(config: TransferConfig) -> int:
    """Fine-tune as configured; prints the result. Returns the exit code."""
    stored = None
    if config.checkpoint != SCRATCH and config.resume is None:
        try:
            stored = _find_weights(config)
        except ConfigError as error:
            if not speaks(os.environ):  # every rank that torchrun started finds the same: one of them speaks
                return error.exit_code
            raise
        # What "auto" has found is the run's from now on, and so it is for all of its seeds.
        config = dataclasses.replace(config, checkpoint=str(stored.path))
    body = TrainedBody(label=checkpoint_label(config.checkpoint), stored=stored)
    lines = train.train(config, body) if config.seeds == 1 else _run_seeds(config, body)
    if lines:
        print("\n".join(lines))
    return 0


def _find_weights(config: TransferConfig) -> StoredWeights:
    """Raises ConfigError, one line, when there are none, which for `auto` says how to make them."""
    from gpipe_cli.training.transfer import structure
    from gpipe_cli.training.weights import find_newest, open_weights

    if config.checkpoint != AUTO:
        return open_weights(config.checkpoint)
    wanted = structure(dataclasses.asdict(config.model), config.image_size)

    def is_pretraining(other: Mapping[str, Any]) -> bool:
        # A network that has been fine-tuned already would make the result depend on how often the command was typed.
        return bool(other["command"] == "train" and structure(other["model"], other.get("image_size")) == wanted)

    path = find_newest(config.results_dir, is_pretraining)
    if path is None:
        runs = Path(config.results_dir, "runs")
        problem = f"no run of gpipe train with this network below {runs}; make one with: {_pretraining(config)}"
        raise ConfigError("checkpoint", AUTO, f"{problem}; or name a checkpoint")
    return open_weights(path)


def _pretraining(config: TransferConfig) -> str:
    """The command that trains this network on data that suit those it will be fine-tuned on."""
    name, classes = config.dataset.name, config.dataset.classes
    words = [word for word in sys.argv[2:] if word.startswith(("model=", "model.", "image_size=", "results_dir="))]
    if name in ("digits", "synthetic"):
        data = [f"dataset={name}"]
        others = [digit for digit in map(str, range(10)) if digit not in map(str, classes or ())]
        data += [f"dataset.classes=[{','.join(others)}]"] if name == "digits" and classes and others else []
    elif config.image_size is not None and config.image_size < 64:
        data = ["dataset=cifar100" if name == "cifar10" else "dataset=cifar10"]
    else:
        data = ["dataset=imagenet", "dataset.path=IMAGENET"]
    return shlex.join(["gpipe", "train", *words, *data])


# --- several seeds ---


def _run_seeds(config: TransferConfig, body: TrainedBody) -> list[str]:
    """A run for every seed, in folders `seed-<seed>` of the run's folder; then their mean as the run's own result."""
    in_table = config.steps is None and config.epochs > 0
    resuming = config.resume is not None
    is_main = speaks(os.environ)
    if resuming and Path(str(config.resume)).resolve() != Path(str(config.run_dir)).resolve():
        problem = f"the runs of several seeds go on where they are, in {config.resume}; leave it out"
        raise ConfigError("run_dir", config.run_dir, problem)
    folder = _claim_folder(config, in_table, resuming) if is_main or resuming else Path()
    runs = {seed: folder / f"seed-{seed}" for seed in range(config.seed, config.seed + config.seeds)}
    for number, (seed, run_dir) in enumerate(runs.items(), start=1):
        if is_main:
            print(f"gpipe: seed {seed}, run {number} of {config.seeds}", file=sys.stderr, flush=True)
        one = dataclasses.replace(config, seed=seed, seeds=1, run_dir=str(run_dir), resume=None)
        try:
            _run_one(one, body, resuming)
        except ConfigError:
            if is_main and not resuming and not any(run.exists() for run in runs.values()):
                shutil.rmtree(folder)  # refused before anything began
            raise
    return _conclude(config, folder, runs, in_table) if is_main else []


def _claim_folder(config: TransferConfig, in_table: bool, resuming: bool) -> Path:
    if in_table:
        check_tables_can_be_written(Path(config.results_dir))
    names = (config.command, config.model.name, config.dataset.name)
    folder = claim_run_directory(config.run_dir, config.results_dir, *names)
    if not resuming and any(folder.glob("seed-*")):
        problem = f"already holds runs of several seeds; choose another folder, or resume={config.run_dir} to go on"
        raise ConfigError("run_dir", config.run_dir, problem)
    write_config(folder, dataclasses.asdict(config))
    return folder


def _run_one(config: TransferConfig, body: TrainedBody, resuming: bool) -> None:
    """One seed's run; when `resuming`, from its newest checkpoint on, or anew where it had none yet."""
    if resuming:
        from gpipe_cli.training.checkpoints import find_latest
        from gpipe_cli.training.weights import open_weights

        run_dir = Path(str(config.run_dir))
        if find_latest(run_dir / "checkpoints") is not None:
            config = dataclasses.replace(config, resume=str(run_dir))
        else:
            (run_dir / "metrics.jsonl").unlink(missing_ok=True)
            if config.checkpoint != SCRATCH:
                body = dataclasses.replace(body, stored=open_weights(config.checkpoint))
    train.train(config, body, in_table=False)


def _conclude(config: TransferConfig, folder: Path, runs: Mapping[int, Path], in_table: bool) -> list[str]:
    summaries = [_read_summary(run_dir) for run_dir in runs.values()]
    summary = mean_of(summaries)
    with one_line_if_not_written(folder):
        write_summary(folder, summary)
    table = Path(config.results_dir, "accuracy.md") if in_table else None
    if table is not None:
        from gpipe_cli.reporting.accuracy import update_accuracy

        with one_line_if_not_written(table):
            update_accuracy(table.parent, config, summary)
    each = ", ".join(f"{100 * one.top1:.2f}" for one in summaries if one.top1 is not None)
    places = {"table": str(table) if table is not None else None, "run": str(folder)}
    return result_lines(summary, **{"each seed": f"{each} %" if each else None}, **places)


def _read_summary(run_dir: Path) -> Summary:
    path = run_dir / "summary.json"
    try:
        return Summary(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        problem = "cannot be read, though its run has ended; remove the run's folder, and resume to train it again"
        raise CheckpointError(path, problem) from error


def mean_of(summaries: Sequence[Summary]) -> Summary:
    """The result of several seeds: means, the sample standard deviation of top-1, time altogether, largest memory."""

    def mean(name: str) -> float | None:
        values = [getattr(summary, name) for summary in summaries]
        return statistics.fmean(values) if None not in values else None

    names = ("top1", "top5", "loss", "train_loss", "samples_per_s", "step_time_s", "bubble_fraction")
    top1 = [summary.top1 for summary in summaries if summary.top1 is not None]
    times = [summary.duration_s or 0.0 for summary in summaries]
    peaks = [summary.peak_memory_bytes_per_rank or [] for summary in summaries]
    facts: dict[str, Any] = {name: mean(name) for name in names}
    return dataclasses.replace(
        summaries[0],
        **facts,
        num_seeds=len(summaries),
        top1_std=statistics.stdev(top1) if len(top1) > 1 else None,
        duration_s=sum(times),
        peak_memory_bytes_per_rank=[max(of_rank) for of_rank in zip(*peaks, strict=False)],
    )
