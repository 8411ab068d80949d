"""What a run consists of, and mistakes found before it leaves a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.errors import ConfigError, TrainingError
from gpipe_cli.training.session import Session

MakeSession = Callable[..., Session]


def test_whole_mini_batches_make_an_epoch_and_steps_may_end_the_run(make_session: MakeSession) -> None:
    session = make_session("dataset.size=40", "epochs=3")
    assert (session.steps_per_epoch, session.num_steps) == (2, 6)
    assert make_session("dataset.size=40", "epochs=3", "steps=5").num_steps == 5
    assert make_session("dataset.size=40", "epochs=3", "steps=50").num_steps == 6
    assert session.lr_schedule.num_steps == 6


def test_an_average_and_listeners_to_the_progress_are_there_when_asked_for(make_session: MakeSession) -> None:
    bare = make_session()
    assert bare.average is None
    assert make_session("ema_decay=0.5").average is not None
    assert len(make_session("model.drop_path=0.5").progress_listeners) > 0


@pytest.mark.parametrize("channels_last", ["true", "false"])
def test_weights_have_the_memory_format_asked_for(make_session: MakeSession, channels_last: str) -> None:
    kernels = [p for p in make_session(f"channels_last={channels_last}").pipe.parameters() if p.dim() == 4]
    told_apart = [kernel for kernel in kernels if kernel.shape[1] > 1 and kernel.shape[2] * kernel.shape[3] > 1]
    assert told_apart
    as_asked = torch.channels_last if channels_last == "true" else torch.contiguous_format
    assert all(kernel.is_contiguous(memory_format=as_asked) for kernel in told_apart)


def test_the_automatic_cut_is_by_cost_and_a_balance_overrides_it(make_session: MakeSession) -> None:
    automatic = make_session("partitions=2", "ranks=1").pipe.balance
    assert sum(automatic) == 6
    assert min(automatic) > 1  # one layer of the six is never half of the work
    assert make_session("partitions=2", "ranks=1", "balance=[1,5]").pipe.balance == (1, 5)
    assert sum(make_session("partitions=2", "ranks=1", "cut=time").pipe.balance) == 6


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("batch_size=33",), "batch_size=33: synthetic has only 32 training samples; use at most that"),
        (("partitions=2", "ranks=1", "balance=[1,1]"), "balance=[1,1]: sums to 2, the network has 6 layers; "),
        (("partitions=9", "ranks=1"), "partitions=9: "),
    ],
)
def test_what_does_not_fit_the_data_or_the_network_is_refused(
    make_session: MakeSession, words: tuple[str, ...], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_session(*words)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("last_layer", "shapes"),
    [
        ("nn.Linear(192, 5)", "(4, 5)"),
        ("nn.Unflatten(1, (3, 64))", "(4, 3, 64)"),
        ("Triple(192, num_classes)", "(4, 10), (4, 10), (4, 10)"),
    ],
)
def test_outputs_that_are_no_logits_are_refused_with_their_shape(
    make_session: MakeSession, gpipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_layer: str, shapes: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = f"""
        from torch import nn

        class Triple(nn.Linear):
            def forward(self, x):
                return (super().forward(x),) * 3

        def layers(num_classes):
            return nn.Sequential(nn.Flatten(), nn.Linear(192, 192), {last_layer})
    """
    session = make_session(gpipe.network(tmp_path, source), base=gpipe.tiny_module)
    with pytest.raises(TrainingError) as error:
        session.pipe.forward_backward(torch.zeros(16, 3, 8, 8), torch.arange(16) % 10)
    assert f"the last layer returns {shapes}; expected logits (4, 10)" in str(error.value)
