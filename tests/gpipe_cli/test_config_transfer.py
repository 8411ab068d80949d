"""Settings of `gpipe transfer` that cannot work together, and a checkpoint's name in the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_cli.compose import load
from gpipe_cli.config_transfer import checkpoint_label
from gpipe_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "freeze=true layer_decay=0.5",
            "layer_decay=0.5: has no effect with freeze=true, which leaves the body as it is",
        ),
        ("freeze=true head_warmup_epochs=1", "head_warmup_epochs=1: has no effect with freeze=true"),
        ("checkpoint=scratch freeze=true", "freeze=true: is for a body that has been trained, but checkpoint=scratch"),
        ("checkpoint=scratch layer_decay=0.5", "layer_decay=0.5: is for a body that has been trained"),
        ("epochs=2 head_warmup_epochs=2", "head_warmup_epochs=2: leaves none of epochs=2 to train the body; use less"),
        ("layer_decay=0", "layer_decay=0: expected a number, more than 0 and at most 1"),
        ("seeds=0", "seeds=0: expected a whole number, 1 or more"),
        ("seed=4294967295 seeds=2", "seeds=2: counted from seed=4294967295, the last one is above 2^32 - 1"),
        ("model=transformer", "model=transformer: gpipe transfer is for pictures; a language model goes on with gpipe"),
        ("dataset=text model=amoebanet", "dataset=text: gpipe transfer is for pictures; a language model goes on with"),
        ("micro_batches=99", "micro_batches=99: there are only batch_size=64 samples to split"),  # as in training
    ],
)
def test_what_cannot_work_is_refused_in_one_line(words: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("transfer", words.split())
    assert str(error.value).startswith(problem)


def test_a_checkpoint_is_called_by_its_run(tmp_path: Path) -> None:
    assert checkpoint_label("results/runs/one/checkpoints/step-00000004") == "one/step-00000004"
    assert checkpoint_label(str(tmp_path / "two" / "best" / "step-00000004")) == "two/step-00000004"
    assert [checkpoint_label(name) for name in ("scratch", "x/model.safetensors")] == ["scratch", "model.safetensors"]
