"""Going on with a run: its newest whole checkpoint put back into the session, and what differs from it said."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.summary import counted
from gpipe_cli.resume import changed_settings, refuse_another_run
from gpipe_cli.training.communication import from_first

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig
    from gpipe_cli.training.session import Session


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where an earlier run had got to, and what differs from it."""

    checkpoint: Path
    step: int
    best_score: float | None
    notes: tuple[str, ...]


def resume(session: Session) -> Resumed:
    """Put the run that `resume` names back into the session. Collective."""
    from gpipe_cli.training.checkpoints import load_facts, resolve
    from gpipe_cli.training.state import restore

    named = str(session.config.resume)
    path = from_first(session.groups, lambda: resolve(Path(named)))
    facts = load_facts(path)
    refuse_another_run(named, facts["config"], dataclasses.asdict(session.config))
    restore(session, path)
    return Resumed(
        checkpoint=path,
        step=int(facts["step"]),
        best_score=facts.get("best_score", facts.get("best_top1")),  # its name in earlier runs
        notes=tuple(_resume_notes(session, facts, path)),
    )


def _resume_notes(session: Session, facts: dict[str, Any], path: Path) -> list[str]:
    from gpipe_cli.training.checkpoints import passed_over
    from gpipe_cli.training.lr_schedule import LrSchedule, describe_horizon_change

    config, step = session.config, int(facts["step"])
    notes = passed_over(path) if path != Path(str(config.resume)) else []
    notes += [f"resumed from {path}: {counted(step, 'step')} done"]
    notes += [f"changed: {line}" for line in changed_settings(facts["config"], dataclasses.asdict(config))]
    steps_per_epoch = int(facts["steps_per_epoch"])
    if steps_per_epoch != session.steps_per_epoch:
        place = f"step {step} now lies in epoch {step // session.steps_per_epoch + 1}"
        notes.append(f"changed: steps in an epoch: {steps_per_epoch} -> {session.steps_per_epoch}; {place}")
    before = LrSchedule(config.lr_schedule, config.optimizer.lr, steps_per_epoch, int(facts["config"]["epochs"]))
    horizon = describe_horizon_change(before, session.lr_schedule, step)
    return notes + ([horizon] if horizon is not None else [])


def nothing_to_do(config: TrainConfig, resumed: Resumed) -> str:
    """The line for a run that had ended."""
    more = "raise epochs" if config.steps is None or config.steps > resumed.step else "raise steps, or set steps=null,"
    return f"{resumed.checkpoint}: all {counted(resumed.step, 'step')} done, nothing to do; {more} to train on"
