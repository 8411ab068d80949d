"""The settings of `gpipe transfer`: those of `gpipe train`, and where the weights come from and how they may move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.checks import check_together
from gpipe_cli.config import TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.fields import setting

AUTO, SCRATCH = "auto", "scratch"


@dataclass(frozen=True, kw_only=True)
class TransferConfig(TrainConfig):
    """`gpipe transfer`."""

    checkpoint: str = setting(
        "where the weights come from: a run folder, a checkpoint or an exported safetensors file, which bring their "
        "network; auto: the newest run of gpipe train with this network; scratch: nowhere, to compare with"
    )
    freeze: bool = setting("train the head only; nothing of the body moves, BatchNorm's statistics included")
    layer_decay: float = setting(
        "factor on the learning rate from each layer to the one below it, 0.75 say; 1: one rate for all",
        above=0,
        at_most=1,
    )
    head_warmup_epochs: float = setting("first epochs in which only the head trains", at_least=0)
    seeds: int = setting("runs with seed, seed+1, ...; the table gets their mean and spread", at_least=1)

    def check(self) -> None:
        """Raises ConfigError for the first pair of settings in conflict."""
        problem = "gpipe transfer is for pictures; a language model goes on with gpipe train resume=RUN"
        if self.model.name == "transformer":
            raise ConfigError("model", "transformer", problem)
        if self.dataset.name == "text":
            raise ConfigError("dataset", "text", problem)
        self._check_body()
        check_together(self)

    def _check_body(self) -> None:
        """What is done with a loaded body must not be asked for in vain."""
        body = {"freeze": False, "layer_decay": 1.0, "head_warmup_epochs": 0.0}
        changed = [name for name, neutral in body.items() if getattr(self, name) != neutral]
        if self.checkpoint == SCRATCH and changed:
            problem = "is for a body that has been trained, but checkpoint=scratch; leave one of them out"
            raise ConfigError(changed[0], getattr(self, changed[0]), problem)
        if self.freeze and len(changed) > 1:
            problem = "has no effect with freeze=true, which leaves the body as it is; leave one of them out"
            raise ConfigError(changed[1], getattr(self, changed[1]), problem)
        if self.epochs > 0 and self.head_warmup_epochs >= self.epochs:
            problem = f"leaves none of epochs={self.epochs} to train the body; use less, or freeze=true"
            raise ConfigError("head_warmup_epochs", self.head_warmup_epochs, problem)
        if self.seed + self.seeds > 2**32:
            problem = f"counted from seed={self.seed}, the last one is above 2^32 - 1; use a smaller seed"
            raise ConfigError("seeds", self.seeds, problem)


def checkpoint_label(checkpoint: str) -> str:
    """A checkpoint's name without the folder that the results lie in: "RUN/step-00000264", "model.safetensors"."""
    path = Path(checkpoint)
    if not path.name.startswith("step-"):  # scratch, a file, a run
        return path.name
    return f"{path.absolute().parents[1].name}/{path.name}"  # below RUN/checkpoints/ or RUN/best/
