"""Settings that fit alone but not together."""

from __future__ import annotations

import pytest

from gpipe_cli.compose import load
from gpipe_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("replicas=2", "replicas=2: replicas of the pipeline come later; use replicas=1 and partitions=N for now"),
        (
            "micro_batches=8 batch_size=4",
            "micro_batches=8: there are only batch_size=4 samples to split; "
            "use micro_batches=4 or less, or a larger batch_size",
        ),
        (
            "balance=[2,2] partitions=3",
            "balance=[2,2]: names 2 partitions but partitions=3; "
            "give one number of layers for each, or leave balance out",
        ),
        (
            "balance=[2,2] partitions=2 cut=time",
            "cut=time: is the cost for the automatic balance; leave out either cut or balance",
        ),
        (
            "remat=none memory_gb=8",
            "memory_gb=8: is what remat=auto fills, but remat=none; add remat=auto, or leave memory_gb out",
        ),
        (
            "taper=true micro_batches=2",
            "taper=true: has no effect on micro_batches=2 of batch_size=64; use three or more, of more samples, "
            "or leave it out",
        ),
        (
            "taper=true micro_batches=8 batch_size=8",
            "taper=true: has no effect on micro_batches=8 of batch_size=8; use three or more, of more samples, "
            "or leave it out",
        ),
        ("ranks=3 partitions=2", "ranks=3: there is work for partitions=2 ranks only; use ranks=2 or less"),
        ("model=module", "model.factory=null: model=module needs model.factory=package.module:function"),
        ("model=module model.factory=mine", "model.factory=mine: expected package.module:function"),
        ("model=module model.factory=a.:b", "model.factory=a.:b: expected package.module:function"),
        ("model.filters=10", "model.filters=10: expected a multiple of 4, the stem has a quarter of them"),
        (
            "model.drop_path_by_depth=true",
            "model.drop_path_by_depth=true: has no effect without model.drop_path; set model.drop_path=0.2",
        ),
        ("image_size=7", "image_size=7: too small for model=amoebanet; use image_size=8 or more"),
        (
            "epochs=2 lr_schedule.warmup_epochs=5",
            "lr_schedule.warmup_epochs=5: the warm-up is longer than epochs=2; "
            "use lr_schedule.warmup_epochs=2 or less, or more epochs",
        ),
        (
            "optimizer.lr=0.1 lr_schedule.min_lr=0.2",
            "lr_schedule.min_lr=0.2: is above optimizer.lr=0.1; use a smaller lr_schedule.min_lr",
        ),
    ],
)
def test_an_impossible_combination_is_refused_in_one_line(words: str, line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load("train", words.split())
    assert str(refusal.value) == line


@pytest.mark.parametrize(
    "words",
    [
        "epochs=0",
        "epochs=1",
        "epochs=2 lr_schedule.warmup_epochs=2",
        "micro_batches=3 batch_size=8",
        "taper=true micro_batches=3 batch_size=4",
        "micro_batches=1 partitions=4",
        "micro_batches=8 batch_size=8",
        "balance=[1,2,1] partitions=3",
        "ranks=2 partitions=4",
        "model=module model.factory=a:b image_size=2",
        "precision=bf16 device=cpu",
    ],
)
def test_unusual_combinations_that_work_are_taken(words: str) -> None:
    load("train", words.split())
