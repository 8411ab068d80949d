"""What a checkpoint holds, and how a run is put back into it: any partitions, balance or ranks read what others wrote.

Keys are global names: "model/<layer>.<tensor>", "optimizer/<layer>.<parameter>/<state>", "ema/<layer>.<tensor>".
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpipe_cli.errors import CheckpointError, TrainingError
from gpipe_cli.reporting.environment import versions
from gpipe_cli.training import checkpoint_files, checkpoints
from gpipe_cli.training.communication import from_all
from gpipe_cli.training.ema import PREFIX as AVERAGE
from gpipe_cli.training.optimizer_state import PREFIX as OPTIMIZER
from gpipe_cli.training.weights import MODEL

if TYPE_CHECKING:
    from gpipe_cli.training.background_saving import BackgroundSaver
    from gpipe_cli.training.session import Session


def save_checkpoint(
    session: Session,
    run_dir: Path,
    step: int,
    best_score: float | None,
    *,
    is_best: bool = False,
    saver: BackgroundSaver | None = None,
) -> Path:
    """Write `run_dir/checkpoints/step-<step>`, and keep it in `run_dir/best/` if it is the best. Collective.

    With a `saver`, training may go on as soon as the tensors are copied: what is saved is the state at this moment.

    Raises TrainingError, and writes nothing, when a weight is not finite; CheckpointError when the disk refuses, which
    a `saver` raises later.
    """
    _refuse_non_finite(session, step)
    pipe = session.pipe
    names = {parameter: name for name, parameter in pipe.named_parameters()}
    tensors = {MODEL + key: tensor for key, tensor in pipe.state_dict().items()}
    tensors |= checkpoints.optimizer_tensors(session.optimizer, names)
    if session.average is not None:
        tensors |= session.average.state_dict()
    facts = {
        "step": step,
        "steps_per_epoch": session.steps_per_epoch,
        "best_score": best_score,
        "num_parameters": pipe.num_parameters,
        "layers": list(pipe.layer_names),
        "data": dataclasses.asdict(session.info),
        "config": dataclasses.asdict(session.config),
        "versions": versions(),
    }
    directory = run_dir / "checkpoints"
    best = run_dir / "best" if is_best else None
    write = partial(checkpoints.save, directory, step, facts=facts, keep=session.config.keep_checkpoints, best=best)
    if saver is None:
        return write(tensors, process_group=session.groups.control if session.groups is not None else None)
    saver.start(tensors, write)
    return checkpoint_files.path_of(directory, step)


def restore(session: Session, path: Path) -> None:
    """Put weights, running statistics, optimizer and average back from a whole checkpoint; each rank reads its own
    part.

    Raises CheckpointError for a checkpoint of another network or other classes.
    """
    facts = checkpoints.load_facts(path)
    stored_classes = list(facts["data"]["classes"])
    if stored_classes != list(session.info.classes):
        known, now = _classes(stored_classes), _classes(list(session.info.classes))
        raise CheckpointError(path, f"was trained on {known}, the data has {now}: resume needs the same classes")
    stored_text, text = facts["data"].get("text_digest"), getattr(session.info, "text_digest", None)
    if stored_text != text:
        problem = f"was trained on text {stored_text}, the data are {text}: resume needs the same text"
        raise CheckpointError(path, problem)
    pipe = session.pipe
    own = {MODEL + key: tensor for key, tensor in pipe.state_dict().items()}
    prefixes = tuple(f"{OPTIMIZER}{name}/" for name, _ in pipe.named_parameters())
    average = session.average.state_dict() if session.average is not None else {}
    optimizer_keys = [key for key in checkpoints.keys(path) if key.startswith(prefixes)] if prefixes else []
    tensors = checkpoints.load(path, [*own, *average, *optimizer_keys])
    for key, tensor in own.items():
        if tensors[key].shape != tensor.shape:
            stored, wanted = tuple(tensors[key].shape), tuple(tensor.shape)
            name = key.removeprefix(MODEL)
            raise CheckpointError(
                path, f"{name} has shape {stored}, this network's has {wanted}: resume needs the same"
            )
    pipe.load_state_dict({key.removeprefix(MODEL): tensors[key] for key in own})
    names = {parameter: name for name, parameter in pipe.named_parameters()}
    checkpoints.restore_optimizer(session.optimizer, names, tensors)
    if session.average is not None:
        session.average.load_state_dict({key: tensors[key] for key in tensors if key.startswith(AVERAGE)})
    pipe.step = facts["step"]


def _refuse_non_finite(session: Session, step: int) -> None:
    own: list[str] = []
    for name, tensor in session.pipe.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            own.append(name)
            break
    bad: list[Any] = [name for names in from_all(session.groups, own) for name in names]
    if bad:
        raise TrainingError(
            f"{bad[0]} is not finite after step {step}: no checkpoint is written, earlier ones are as they were; "
            "use a smaller optimizer.lr, or clip_grad_norm=1"
        )


def _classes(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} classes ({shown})"
