"""`gpipe train`: build a session in every rank, train it, and write down what came of it."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.distributed.devices import plan_ranks
from gpipe_cli.distributed.launch import RankContext, launch
from gpipe_cli.reporting.summary import Summary, dataset_label, result_lines, summary_of, write_summary

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig
    from gpipe_cli.training.loop import Outcome, Trainer
    from gpipe_cli.training.session import Session


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank needs to know to take part."""

    config: TrainConfig
    command_line: str
    began_s: float  # time.time when the command started
    notes: tuple[str, ...]


def run(config: TrainConfig) -> int:
    """Train as configured; prints the result. Returns the exit code."""
    plan = plan_ranks(
        partitions=config.partitions,
        replicas=config.replicas,
        device=config.device,
        ranks=config.ranks,
        threads=config.threads,
    )
    _import_before_forking()
    words = ["gpipe", *sys.argv[1:]]
    job = Job(config=config, command_line=shlex.join(words), began_s=time.time(), notes=plan.notes)
    lines = launch(work, job, plan)
    if lines:
        print("\n".join(lines))
    return 0


def _import_before_forking() -> None:
    """Pay for the slow imports once, in the process that the ranks are forked from."""
    import timm.optim
    import timm.scheduler  # noqa: F401

    import gpipe_cli.training.loop
    import gpipe_cli.training.session  # noqa: F401


def work(context: RankContext, job: Job) -> list[str]:
    """One rank's run, from the data's facts to the result; returns the lines to show (none but on the first rank)."""
    from gpipe_cli.training.checkpoints import load_facts, resolve
    from gpipe_cli.training.communication import from_first
    from gpipe_cli.training.loop import Trainer
    from gpipe_cli.training.session import build_session
    from gpipe_cli.training.state import restore

    config = job.config
    session = build_session(config, context)
    start, best_top1, notes = 0, None, list(job.notes)
    if config.resume is not None:
        named = Path(config.resume)
        path = from_first(session.groups, lambda: resolve(named))
        facts = load_facts(path)
        restore(session, path)
        start, best_top1 = int(facts["step"]), facts["best_top1"]
        notes += _resume_notes(session, facts, path)
        if start >= session.num_steps:
            done = f"{path}: all {start} steps are done, nothing to do; raise epochs to train on"
            return [done] if context.is_main else []
    run_dir = Path(from_first(session.groups, lambda: str(_claim_run_directory(config))))
    report = _open_report(session, run_dir, start if config.resume is not None else None) if context.is_main else None
    trainer = Trainer(session=session, run_dir=run_dir, report=report, start=start, best_top1=best_top1)
    try:
        if report is not None:
            for note in [*notes, *_introduction(session, run_dir)]:
                report.message(note)
        outcome = trainer.run()
    finally:
        if report is not None:
            report.close()
    return _conclude(job, trainer, outcome)


def _claim_run_directory(config: TrainConfig) -> Path:
    from gpipe_cli.reporting.run_directory import given_run_directory, new_run_directory, write_config

    if config.run_dir is not None:
        run_dir = given_run_directory(Path(config.run_dir), resumed=config.resume is not None)
    else:
        run_dir = new_run_directory(Path(config.results_dir), config.command, config.model.name, config.dataset.name)
    write_config(run_dir, dataclasses.asdict(config))
    return run_dir


def _open_report(session: Session, run_dir: Path, resumed_from: int | None) -> Any:
    from gpipe_cli.reporting.report import RunReport

    return RunReport(
        run_dir,
        progress=session.config.progress,
        num_steps=session.num_steps,
        resumed_from=resumed_from,
        tensorboard=session.config.tensorboard,
    )


def _introduction(session: Session, run_dir: Path) -> list[str]:
    pipe, config, context = session.pipe, session.config, session.context
    ranks = "1 process" if context.world_size == 1 else f"{context.world_size} processes"
    threads = f"{context.num_threads} thread{'s' * (context.num_threads > 1)} each"
    return [
        f"{config.model.name}: {pipe.num_parameters:,} parameters in {len(pipe.layer_names)} layers, "
        f"cut {'+'.join(str(size) for size in pipe.balance)}; {ranks} on {pipe.device.type}, {threads}",
        f"{session.info.name}: {session.info.num_train:,} training and {session.info.num_eval:,} held-out samples, "
        f"{session.info.num_classes} classes; run in {run_dir}",
    ]


def _resume_notes(session: Session, facts: dict[str, Any], path: Path) -> list[str]:
    from gpipe_cli.resume import changed_settings
    from gpipe_cli.training.lr_schedule import LrSchedule, describe_horizon_change

    config, step = session.config, int(facts["step"])
    notes = [f"resumed from {path}: {step} steps done"]
    notes += [f"changed: {line}" for line in changed_settings(facts["config"], dataclasses.asdict(config))]
    before = LrSchedule(
        config.lr_schedule, config.optimizer.lr, int(facts["steps_per_epoch"]), int(facts["config"]["epochs"])
    )
    horizon = describe_horizon_change(before, session.lr_schedule, step)
    return notes + ([horizon] if horizon is not None else [])


def _conclude(job: Job, trainer: Trainer, outcome: Outcome) -> list[str]:
    """Gather what the ranks measured, write the summary, the picture and the table. Collective."""
    from gpipe_cli.reporting.accuracy import update_accuracy
    from gpipe_cli.reporting.curves import plot_curves
    from gpipe_cli.training.communication import from_all

    session, config = trainer.session, job.config
    clock = outcome.clock
    idle = from_all(session.groups, clock.wait_s / clock.step_s if clock.step_s else None)
    peaks = from_all(session.groups, outcome.peak_memory_bytes)
    if not session.context.is_main:
        return []
    summary = _summarise(job, session, outcome, idle, peaks)
    write_summary(trainer.run_dir, summary)
    title = f"{summary.model} on {dataset_label(config.dataset.name, config.dataset.path)}"
    plot_curves(trainer.run_dir, f"{title}, {summary.partitions} partitions, {summary.micro_batches} micro-batches")
    lines = result_lines(summary)
    if config.steps is None and config.epochs > 0:
        update_accuracy(Path(config.results_dir), config, summary)
        lines.append(f"{'tables':<8}  {Path(config.results_dir, 'accuracy.md')}")
    return [*lines, f"{'run':<8}  {trainer.run_dir}"]


def _summarise(job: Job, session: Session, outcome: Outcome, idle: list[float | None], peaks: list[int]) -> Summary:
    from gpipe_cli.reporting.environment import machine, versions

    clock, info, evaluation = outcome.clock, session.info, outcome.evaluation
    shares = [share for share in idle if share is not None]
    on_cpu = session.pipe.device.type == "cpu"  # on a GPU the host's waiting says nothing about the device's
    return summary_of(
        job.config,
        num_parameters=session.pipe.num_parameters,
        device=session.pipe.device.type,
        world_size=session.context.world_size,
        samples_per_s=clock.num_samples / clock.step_s if clock.step_s else None,
        step_time_s=clock.step_s / clock.num_steps if clock.num_steps else None,
        peak_memory_bytes_per_rank=peaks,
        bubble_fraction=sum(shares) / len(shares) if shares and on_cpu else None,
        top1=evaluation.top1 if evaluation is not None else None,
        top5=evaluation.top5 if evaluation is not None else None,
        loss=evaluation.loss if evaluation is not None else None,
        versions=versions(),
        num_classes=info.num_classes,
        num_train=info.num_train,
        num_eval=info.num_eval,
        epochs=outcome.steps // session.steps_per_epoch,
        steps=outcome.steps,
        train_loss=outcome.train_loss,
        duration_s=time.time() - job.began_s,
        machine=str(machine(session.pipe.device.type)),
        date=time.strftime("%Y-%m-%d"),
        command_line=job.command_line,
    )
