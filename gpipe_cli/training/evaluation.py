"""Accuracy on the held-out split: every sample once, counted where the outputs are, known everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from gpipe_cli.data.loaders import SkippedPictures, eval_loader
from gpipe_cli.training.batches import evaluation_batches
from gpipe_cli.training.communication import from_last
from gpipe_cli.training.metrics import Accuracy, EvalResult, result_of

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from gpipe_cli.training.session import Session


def evaluate(session: Session, dataset: Dataset[Any] | None, skipped: SkippedPictures | None) -> EvalResult:
    """Top-1, top-5 and loss of the current weights, the same on every rank. Collective.

    `dataset`: the held-out split on the first stage's rank, kept open between evaluations.
    """
    config, pipe = session.config, session.pipe
    loader = None
    if pipe.is_first:
        loader = eval_loader(
            config.dataset,
            session.info,
            image_size=config.image_size,
            batch_size=config.eval_batch_size or config.batch_size,
            workers=config.workers,
            seed=config.seed,
            dataset=dataset,
            skipped=skipped,
        )
    accuracy = Accuracy()
    for images, labels in evaluation_batches(pipe, session.groups, loader, channels_last=config.channels_last):
        outputs = pipe.evaluate(images)
        if outputs is not None:
            assert isinstance(labels, Tensor)
            accuracy.update(outputs, labels.to(pipe.device))
    counts = from_last(session.groups, accuracy.counts().tolist() if pipe.is_last else None)
    return result_of(counts)
