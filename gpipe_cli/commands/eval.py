"""`gpipe eval`: what a checkpoint makes of a split, its weights as one file, or a text that it goes on with."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.config_eval import EvalConfig, run_settings
from gpipe_cli.distributed.devices import RankPlan, plan_ranks
from gpipe_cli.distributed.launch import RankContext, launch
from gpipe_cli.distributed.rendezvous import speaks
from gpipe_cli.errors import ConfigError
from gpipe_cli.reporting.run_directory import (
    claim_run_directory,
    one_line_if_not_written,
    write_config,
)
from gpipe_cli.reporting.summary import Summary, counted, result_lines, summary_of, write_summary
from gpipe_cli.training.communication import from_all, from_first

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig
    from gpipe_cli.reporting.progress import Progress
    from gpipe_cli.training.loaded import Evaluation, LoadedNetwork
    from gpipe_cli.training.weights import StoredWeights

AVERAGE, RAW = "average", "raw"
_WORDS = {AVERAGE: "moving average of the weights", RAW: "weights as trained"}
# What would control the terminal instead of being shown, tab and line feed aside: a byte model may write anything.
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank needs to know to take part. `config`: the run's settings, changed where the user asked."""

    own: EvalConfig
    config: TrainConfig
    stored: StoredWeights
    average: bool
    command_line: str
    began_s: float  # time.time when the command started
    notes: tuple[str, ...]


def run(config: EvalConfig) -> int:
    """Evaluate, export or write on, as configured; prints the result. Returns the exit code."""
    began_s = time.time()
    from gpipe_cli.training.export import check_can_be_written, export_weights

    stored = _open(config)
    settings = run_settings(stored.config, config, config.checkpoint)
    average = _wants_average(config, stored)
    num_layers = len(stored.facts.get("layers", ()))
    if 0 < num_layers < settings.partitions:  # before so many processes are started
        raise ConfigError("partitions", settings.partitions, f"the network has {num_layers} layers; use at most that")
    if config.prompt is not None and settings.dataset.name != "text":
        problem = f"model={settings.model.name} was trained on pictures; only a language model can go on with a text"
        raise ConfigError("prompt", config.prompt, problem)
    plan = _plan(settings) if config.evaluated_split is not None or config.prompt is not None else None
    if config.export is not None:
        check_can_be_written(Path(config.export))
        if speaks(os.environ):
            _without_parallel_operations()
            exported = export_weights(stored, settings, Path(config.export), average=average)
            size = f"{counted(exported.num_tensors, 'tensor')}, {exported.num_bytes:,} bytes"
            print(f"{exported.path}: {size}; {_origin(stored, average)}", flush=True)
    if plan is None:
        return 0
    _import_before_forking(settings)
    job = Job(
        own=config,
        config=settings,
        stored=stored,
        average=average,
        command_line=shlex.join(["gpipe", *sys.argv[1:]]),
        began_s=began_s,
        notes=plan.notes,
    )
    if config.prompt is not None:
        launch(write, job, plan)
    if config.evaluated_split is not None:
        lines = launch(evaluate, job, plan)
        if lines:
            print("\n".join(lines), flush=True)
    return 0


def evaluate(context: RankContext, job: Job) -> list[str]:
    """One rank's part of an evaluation; returns the lines to show (none but on the first rank)."""
    from gpipe_cli.training.loaded import evaluate_split, load_network
    from gpipe_cli.training.loop import peak_memory_bytes

    split = job.own.evaluated_split
    assert split is not None
    network = load_network(job.stored, job.config, context, split=split, average=job.average)
    run_dir = Path(from_first(network.groups, lambda: str(_claim_run_directory(job))))
    progress = _progress(network, job, split) if context.is_main else None
    try:
        evaluation = evaluate_split(network, split, progress.update if progress is not None else None)
    finally:
        if progress is not None:
            progress.close()
    peaks = from_all(network.groups, peak_memory_bytes(network.pipe.device))
    return _conclude(job, network, run_dir, evaluation, peaks) if context.is_main else []


def write(context: RankContext, job: Job) -> None:
    """One rank's part of a continuation; the first rank prints it as it comes."""
    from gpipe_cli.data.tokenization import load_tokenizer
    from gpipe_cli.training.loaded import load_network, write_on

    own = job.own
    tokenizer = load_tokenizer(job.config.dataset.tokenizer)
    network = load_network(job.stored, job.config, context, split=None, average=job.average)
    if context.is_main and own.progress != "none":
        print("\n".join([*job.notes, _origin(job.stored, job.average)]), file=sys.stderr, flush=True)
    pieces = write_on(
        network, tokenizer, str(own.prompt), num_tokens=own.num_tokens, temperature=own.temperature, seed=own.seed
    )
    begun = False
    for piece in pieces:
        if context.is_main:
            text = piece if begun else f"{own.prompt}{piece}"
            print(text.translate(_CONTROL), end="", flush=True)
        begun = True
    if context.is_main:
        print(flush=True)


def _open(config: EvalConfig) -> StoredWeights:
    """The checkpoint; for a prompt the newest one is that of a language model. Raises ConfigError."""
    from gpipe_cli.training.weights import find_newest, open_weights

    if config.checkpoint != "auto" or config.prompt is None:
        return open_weights(config.checkpoint, results_dir=config.results_dir)
    newest = find_newest(config.results_dir, lambda settings: settings["dataset"]["name"] == "text")
    if newest is None:
        runs = Path(config.results_dir) / "runs"
        problem = f"no language model below {runs} has a whole checkpoint; gpipe train model=transformer makes one"
        raise ConfigError("checkpoint", "auto", problem)
    return open_weights(newest)


def _without_parallel_operations() -> None:
    """Ranks may be forked from this process afterwards, which is safe while it has no pool of threads."""
    import torch

    torch.set_num_threads(1)


def _plan(config: TrainConfig) -> RankPlan:
    return plan_ranks(
        partitions=config.partitions, replicas=1, device=config.device, ranks=config.ranks, threads=config.threads
    )


def _import_before_forking(config: TrainConfig) -> None:
    """Pay for the slow imports once, in the process that the ranks are forked from."""
    import gpipe_cli.training.loaded  # noqa: F401

    if config.model.name == "amoebanet":
        import timm.layers  # noqa: F401


def _wants_average(config: EvalConfig, stored: StoredWeights) -> bool:
    """Whether the moving average is to be read. Raises ConfigError for weights that the checkpoint does not hold."""
    held = stored.facts.get("weights")  # of an exported file, which holds one set
    if held is not None:
        if config.weights not in ("auto", held):
            problem = f"{stored.path} holds the {_WORDS[held]}; leave it out, or name the run that it came from"
            raise ConfigError("weights", config.weights, problem)
        return False
    if config.weights == AVERAGE and not stored.has_average:
        raise ConfigError("weights", AVERAGE, "the run kept no moving average (ema_decay=0); use weights=raw")
    return stored.has_average and config.weights != RAW


def _which(stored: StoredWeights, average: bool) -> str:
    return str(stored.facts.get("weights", AVERAGE if average else RAW))


def _origin(stored: StoredWeights, average: bool) -> str:
    steps = counted(int(stored.facts.get("step", 0)), "step")
    return f"{_WORDS[_which(stored, average)]} after {steps}, from {stored.path}"


def _claim_run_directory(job: Job) -> Path:
    """Make the folder of the results with the settings in it: the first thing that is written."""
    own, config = job.own, job.config
    if own.run_dir is not None and Path(own.run_dir, "config.yaml").exists():
        raise ConfigError("run_dir", own.run_dir, "already holds a run; choose another folder")
    run_dir = claim_run_directory(own.run_dir, own.results_dir, own.command, config.model.name, config.dataset.name)
    used = {**dataclasses.asdict(own), "checkpoint": str(job.stored.path), "weights": _which(job.stored, job.average)}
    write_config(run_dir, {**used, "run": dataclasses.asdict(config)})
    return run_dir


def _progress(network: LoadedNetwork, job: Job, split: str) -> Progress:
    from gpipe_cli.reporting.progress import Progress

    info, config = network.task.info, job.config
    num_samples = info.num_train if split == "train" else info.num_eval
    num_batches = -(-num_samples // (config.eval_batch_size or config.batch_size))
    progress = Progress(job.own.progress, num_batches, unit=network.task.unit)
    for note in job.notes:
        progress.message(note)
    network.task.report_to(progress.message)
    return progress


def _conclude(job: Job, network: LoadedNetwork, run_dir: Path, evaluation: Evaluation, peaks: list[int]) -> list[str]:
    """Write the summary, and of pictures what became of every class; returns the lines for the screen."""
    from gpipe_cli.reporting.confusion import class_counts, class_lines, plot_confusion, write_per_class

    summary = _summarise(job, network, evaluation, peaks)
    lines = result_lines(summary, run=str(run_dir))
    classes = network.task.info.classes
    with one_line_if_not_written(run_dir):
        write_summary(run_dir, summary)
        if evaluation.confusion is not None:
            counts = class_counts(evaluation.confusion, classes)
            write_per_class(run_dir, counts)
            plot_confusion(run_dir, evaluation.confusion, classes, _title(summary))
            lines += ["", *class_lines(counts)]
    return lines


def _title(summary: Summary) -> str:
    which = "training split" if summary.split == "train" else "held out"
    accuracy = "" if summary.top1 is None else f": top-1 {100 * summary.top1:.2f} %"
    return f"{summary.model} on {summary.dataset}, {which}{accuracy}"


def _summarise(job: Job, network: LoadedNetwork, evaluation: Evaluation, peaks: list[int]) -> Summary:
    from gpipe_cli.reporting.environment import machine, versions

    info, task, pipe = network.task.info, network.task, network.pipe
    split = job.own.evaluated_split
    facts: dict[str, Any] = dict(task.summary_facts(evaluation.result))
    if split == "train":  # these are of the held-out text
        facts |= {name: None for name in ("trigram_bits_per_byte", "bits_per_byte") if name in facts}
    # The summary's batch is the one that was evaluated at a time.
    config = dataclasses.replace(job.config, batch_size=job.config.eval_batch_size or job.config.batch_size)
    return summary_of(
        config,
        **facts,
        num_parameters=pipe.num_parameters,
        device=pipe.device.type,
        world_size=network.context.world_size,
        peak_memory_bytes_per_rank=peaks,
        loss=evaluation.result.loss,
        versions=versions(),
        num_classes=info.num_classes,
        num_train=info.num_train or None,
        num_eval=info.num_eval or None,
        steps=int(job.stored.facts.get("step", 0)),
        split=split,
        num_samples=int(evaluation.result.metrics()["num_eval"]),
        checkpoint=str(job.stored.path),
        weights=_which(job.stored, job.average),
        duration_s=time.time() - job.began_s,
        machine=str(machine(pipe.device.type)),
        date=time.strftime("%Y-%m-%d"),
        command_line=job.command_line,
    )
