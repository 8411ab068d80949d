"""`gpipe train`: build a session in every rank, train it, and write down what came of it."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpipe_cli.commands.resuming import Resumed, nothing_to_do, resume
from gpipe_cli.distributed.devices import plan_ranks
from gpipe_cli.distributed.launch import RankContext, launch
from gpipe_cli.reporting.run_directory import (
    check_tables_can_be_written,
    claim_run_directory,
    holds_checkpoint,
    one_line_if_not_written,
    write_config,
)
from gpipe_cli.reporting.summary import (
    Summary,
    counted,
    pipeline_label,
    result_lines,
    summary_of,
    write_summary,
)
from gpipe_cli.reporting.tensorboard import writer_class
from gpipe_cli.training.communication import from_all, from_first

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig
    from gpipe_cli.training.loop import Outcome, Trainer
    from gpipe_cli.training.session import Session


class Start(Protocol):
    """What a run begins with when that is not the random weights of its seed. Travels to the ranks."""

    @property
    def label(self) -> str:
        """Where the weights come from, for the tables."""

    def prepare(self, session: Session) -> Session:
        """The session as it is to be trained, whether it begins or goes on. Collective."""

    def load(self, session: Session) -> str | None:
        """Put weights into a session that begins; returns a line to tell. Collective."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank needs to know to take part."""

    config: TrainConfig
    command_line: str
    began_s: float  # time.time when the command started
    notes: tuple[str, ...]
    start: Start | None
    in_table: bool


def run(config: TrainConfig) -> int:
    """Train as configured; prints the result. Returns the exit code."""
    lines = train(config)
    if lines:
        print("\n".join(lines))
    return 0


def train(config: TrainConfig, start: Start | None = None, *, in_table: bool = True) -> list[str]:
    """Train as configured, from `start` on; returns the lines to show (none on a rank that is not the first).

    `in_table`: whether a whole run gets a row in the table of accuracies.
    """
    began_s = time.time()
    if config.tensorboard:
        writer_class()
    plan = plan_ranks(
        partitions=config.partitions,
        replicas=config.replicas,
        device=config.device,
        ranks=config.ranks,
        threads=config.threads,
    )
    _import_before_forking()
    words = ["gpipe", *sys.argv[1:]]
    job = Job(
        config=config,
        command_line=shlex.join(words),
        began_s=began_s,
        notes=plan.notes,
        start=start,
        in_table=in_table and config.steps is None and config.epochs > 0,
    )
    return launch(work, job, plan)


def _import_before_forking() -> None:
    """Pay for the slow imports once, in the process that the ranks are forked from."""
    import timm.optim
    import timm.scheduler  # noqa: F401

    import gpipe_cli.training.loop
    import gpipe_cli.training.session  # noqa: F401


def work(context: RankContext, job: Job) -> list[str]:
    """One rank's run, from the data's facts to the result; returns the lines to show (none but on the first rank)."""
    from gpipe_cli.training.loop import Trainer
    from gpipe_cli.training.session import build_session

    config = job.config
    session = build_session(config, context)
    if job.start is not None:
        session = job.start.prepare(session)
    resumed = resume(session) if config.resume is not None else None
    loaded = job.start.load(session) if job.start is not None and resumed is None else None
    if resumed is not None and resumed.step >= session.num_steps:
        return [nothing_to_do(config, resumed)] if context.is_main else []
    run_dir = Path(from_first(session.groups, lambda: str(_claim_run_directory(job, resumed))))
    report = _open_report(session, run_dir, resumed) if context.is_main else None
    trainer = Trainer(session=session, run_dir=run_dir, report=report)
    if resumed is not None:
        trainer.start = resumed.step
        # The best of the folder that is written to: a run that goes on elsewhere has none there yet.
        trainer.best_score = resumed.best_score if holds_checkpoint(run_dir, resumed.checkpoint) else None
    try:
        if report is not None:
            started = resumed.notes if resumed is not None else [loaded] if loaded is not None else []
            for note in [*_introduction(session, run_dir), *job.notes, *started]:
                report.message(note)
        outcome = trainer.run()
    finally:
        if report is not None:
            report.close()
    return _conclude(job, trainer, outcome)


def _claim_run_directory(job: Job, resumed: Resumed | None) -> Path:
    """Make the run's folder with its configuration in it: the first thing that a run writes."""
    config = job.config
    if job.in_table:
        check_tables_can_be_written(Path(config.results_dir))
    names = (config.command, config.model.name, config.dataset.name)
    checkpoint = resumed.checkpoint if resumed is not None else None
    run_dir = claim_run_directory(config.run_dir, config.results_dir, *names, checkpoint=checkpoint)
    write_config(run_dir, dataclasses.asdict(config))
    return run_dir


def _open_report(session: Session, run_dir: Path, resumed: Resumed | None) -> Any:
    from gpipe_cli.reporting.report import RunReport

    return RunReport(
        run_dir,
        progress=session.config.progress,
        num_steps=session.num_steps,
        resumed_from=resumed.step if resumed is not None else None,
        tensorboard=session.config.tensorboard,
        unit=session.task.unit,
    )


def _introduction(session: Session, run_dir: Path) -> list[str]:
    pipe, config, context, info = session.pipe, session.config, session.context, session.info
    cut = f", cut {'+'.join(str(size) for size in pipe.balance)}" if config.partitions > 1 else ""
    what = "classes" if session.task.unit == "images" else "tokens to choose from"
    lines = [
        f"{config.model.name}: {pipe.num_parameters:,} parameters in {counted(len(pipe.layer_names), 'layer')}{cut}; "
        f"{counted(context.world_size, 'rank')} on {pipe.device.type}, {counted(context.num_threads, 'thread')} each",
        f"{info.name}: {info.num_train:,} training and {info.num_eval:,} held-out {_samples(session)}, "
        f"{info.num_classes} {what}; run in {run_dir}",
    ]
    if session.kept is not None:
        lines.append(session.kept.sentence(pipe.schedule))
    if config.micro_batches < config.partitions:
        idle = (config.partitions - 1) / (config.micro_batches + config.partitions - 1)
        lines.append(
            f"micro_batches={config.micro_batches} is less than partitions={config.partitions}: each partition idles "
            f"about {100 * idle:.0f} % of the time; micro_batches={4 * config.partitions} is good"
        )
    return lines


def _samples(session: Session) -> str:
    task = session.task
    return "samples" if task.units_per_sample == 1 else f"blocks of {task.units_per_sample} {task.unit}"


def _conclude(job: Job, trainer: Trainer, outcome: Outcome) -> list[str]:
    """Gather what the ranks measured, write the summary, the picture and the table. Collective."""
    from gpipe_cli.reporting.accuracy import update_accuracy
    from gpipe_cli.reporting.curves import plot_curves

    session, config, run_dir = trainer.session, job.config, trainer.run_dir
    clock = outcome.clock
    idle = from_all(session.groups, clock.wait_s / clock.step_s if clock.step_s else None)
    peaks = from_all(session.groups, outcome.peak_memory_bytes)
    if not session.context.is_main:
        return []
    summary = _summarise(job, session, outcome, idle, peaks)
    title = f"{summary.model} on {summary.dataset}, {pipeline_label(summary)}"
    with one_line_if_not_written(run_dir):
        write_summary(run_dir, summary)
        plot_curves(run_dir, title)
    table = None
    if job.in_table:
        table = Path(config.results_dir, "accuracy.md")
        with one_line_if_not_written(table):
            update_accuracy(table.parent, config, summary)
    return result_lines(summary, table=str(table) if table is not None else None, run=str(run_dir))


def _summarise(job: Job, session: Session, outcome: Outcome, idle: list[float | None], peaks: list[int]) -> Summary:
    from gpipe_cli.pipeline.schedule import num_not_recomputed
    from gpipe_cli.reporting.environment import machine, versions

    clock, info, evaluation = outcome.clock, session.info, outcome.evaluation
    shares = [share for share in idle if share is not None]
    on_cpu = session.pipe.device.type == "cpu"  # on a GPU the host's waiting says nothing about the device's
    task = session.task
    samples_per_s = clock.num_samples / clock.step_s if clock.step_s else None
    return summary_of(
        job.config,
        init=job.start.label if job.start is not None else None,
        **task.summary_facts(evaluation),
        **(task.rates(samples_per_s) if samples_per_s is not None else {}),
        num_parameters=session.pipe.num_parameters,
        kept=list(num_not_recomputed(session.pipe.schedule)) if session.kept is not None else None,
        device=session.pipe.device.type,
        world_size=session.context.world_size,
        samples_per_s=samples_per_s,
        step_time_s=clock.step_s / clock.num_steps if clock.num_steps else None,
        peak_memory_bytes_per_rank=peaks,
        bubble_fraction=sum(shares) / len(shares) if shares and on_cpu else None,
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
