"""Training on pictures with labels: any data set of data/datasets.py, any network from pictures to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpipe_cli.data.datasets import open_split
from gpipe_cli.data.info import DataInfo
from gpipe_cli.data.loaders import BatchLoader, SkippedPictures, eval_loader, train_loader
from gpipe_cli.errors import TrainingError
from gpipe_cli.training.losses import LossFn, Outputs, build_loss
from gpipe_cli.training.made_up import made_up_inputs
from gpipe_cli.training.metrics import Accuracy, EvalResult, result_of
from gpipe_cli.training.networks import build_network
from gpipe_cli.training.task import Split

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from gpipe_cli.config import TrainConfig
    from gpipe_cli.pipeline import Layers


class PictureTask:
    """Pictures (N, 3, S, S) float32 in, logits (N, classes) out, perhaps with auxiliary ones; see task.Task."""

    unit = "images"
    units_per_sample = 1

    def __init__(self, config: TrainConfig, info: DataInfo) -> None:
        assert config.image_size is not None
        self.config, self.info, self.image_size = config, info, config.image_size
        self.splits: dict[str, Dataset[Any]] = {}  # kept open: small data sets keep their decoded pictures
        self._skipped = SkippedPictures()

    def layers(self) -> Layers:
        return build_network(self.config.model, self.info.num_classes, self.image_size, self.config.seed)

    def ties(self) -> tuple[tuple[str, ...], ...]:
        return ()

    def sample(self, num_samples: int, *, meta: bool) -> Tensor:
        generator = None if meta else torch.Generator().manual_seed(0)
        pictures = made_up_inputs(num_samples, image_size=self.image_size, generator=generator)
        layout = torch.channels_last if self.config.channels_last else torch.contiguous_format
        return pictures.contiguous(memory_format=layout)

    def loss_fn(self) -> LossFn:
        """The training loss; for a user's network also a check of what the last layer returns."""
        model, num_classes = self.config.model, self.info.num_classes
        loss_fn = build_loss(self.config.label_smoothing, model.aux_weight)
        if model.name != "module":
            return loss_fn

        def checked(outputs: Outputs, targets: Tensor) -> Tensor:
            shapes = [tuple(out.shape) for out in ((outputs,) if isinstance(outputs, Tensor) else outputs)]
            expected = (len(targets), num_classes)
            if shapes not in ([expected], [expected, expected]) or (len(shapes) == 1) != isinstance(outputs, Tensor):
                raise TrainingError(
                    f"model.factory={model.factory}: the last layer returns {', '.join(map(str, shapes))}; expected "
                    f"logits {expected}, one row a sample, one column a class, or a pair of them and auxiliary logits"
                )
            return loss_fn(outputs, targets)

        return checked

    def train_batches(self, epoch: int, start_batch: int) -> BatchLoader:
        return train_loader(
            self.config.dataset,
            self.info,
            image_size=self.image_size,
            batch_size=self.config.batch_size,
            workers=self.config.workers,
            seed=self.config.seed,
            epoch=epoch,
            start_batch=start_batch,
            dataset=self._open("train"),
            skipped=self._skipped,
        )

    def eval_batches(self, split: Split = "eval") -> BatchLoader:
        return eval_loader(
            self.config.dataset,
            self.info,
            image_size=self.image_size,
            batch_size=self.config.eval_batch_size or self.config.batch_size,
            workers=self.config.workers,
            seed=self.config.seed,
            split=split,
            dataset=self._open(split),
            skipped=self._skipped,
        )

    def report_to(self, message: Callable[[str], None]) -> None:
        self._skipped.report = message

    def counter(self) -> Accuracy:
        return Accuracy()

    def result(self, counts: Sequence[float]) -> EvalResult:
        return result_of(counts)

    def rates(self, samples_per_s: float) -> Mapping[str, float]:
        del samples_per_s  # images are samples
        return {}

    def summary_facts(self, result: EvalResult | None) -> Mapping[str, Any]:
        return {
            "top1": result.top1 if result is not None else None,
            "top5": result.top5 if result is not None else None,
        }

    def _open(self, split: Split) -> Dataset[Any]:
        if split not in self.splits:
            self.splits[split] = open_split(self.config.dataset, split, self.config.seed)
        return self.splits[split]
