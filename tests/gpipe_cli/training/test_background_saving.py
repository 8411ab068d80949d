"""Saving beside the training: what is saved, what goes on meanwhile, and how a failure shows."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.errors import CheckpointError, TrainingError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.background_saving import BackgroundSaver, copy_to_cpu
from gpipe_cli.training.loop import Trainer
from gpipe_cli.training.session import Session

MakeSession = Callable[..., Session]
LIMIT_S = 60.0
# Checkpoints of steps 2, 4 and 6; whatever draws random numbers or keeps state.
WORDS = (
    "epochs=3", "eval_every=0", "checkpoint_every=1", "model.dropout=0.2", "ema_decay=0.9", "optimizer=rmsprop",
    "optimizer.lr=0.01", "keep_checkpoints=9",
)  # fmt: skip


def trainer(session: Session, run_dir: Path) -> Trainer:
    return Trainer(session=session, run_dir=run_dir, report=None)


class Disk:
    """Stands before `os.fsync`, which every file of a checkpoint passes: lets a test hold the disk, or break it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held = threading.Event()  # the disk is being held now
        self.free = threading.Event()
        self.broken = False
        self.threads: set[threading.Thread] = set()
        fsync = os.fsync

        def slow_fsync(descriptor: int) -> None:
            self.threads.add(threading.current_thread())
            self.held.set()
            assert self.free.wait(LIMIT_S), "nobody freed the disk: training does not go on"
            if self.broken:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        patch.setattr(os, "fsync", slow_fsync)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def before_step(session: Session, step: int, action: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Have `action` called in the training thread, when `step` steps are done and the next one begins."""
    forward_backward = session.pipe.forward_backward

    def watched(inputs: Any, targets: Any) -> Any:
        if session.pipe.step == step:
            action()
        return forward_backward(inputs, targets)

    patch.setattr(session.pipe, "forward_backward", watched)


def steps(run_dir: Path) -> list[int]:
    return sorted(checkpoints.load_facts(path)["step"] for path in (run_dir / "checkpoints").glob("step-*"))


def test_copies_are_equal_in_every_respect_and_share_nothing() -> None:
    tensors = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 7, dtype=torch.float64).t(),
        "half": torch.randn(5).to(torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.empty(0),
        "part": torch.arange(10)[2:5],
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    copies = copy_to_cpu(tensors)
    for key, tensor in tensors.items():
        copy = copies[key]
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.stride(), copy.requires_grad) == (tensor.dtype, tensor.stride(), False)
        assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_a_gpu_are_those_of_the_moment() -> None:
    weight = torch.randn(64, 3, 128, 128, device="cuda").to(memory_format=torch.channels_last)
    expected = weight.cpu()
    copies = copy_to_cpu({"weight": weight, "count": torch.tensor(3, device="cuda"), "rate": torch.tensor(0.5)})
    weight.zero_()
    torch.cuda.synchronize()
    assert torch.equal(copies["weight"], expected)
    assert copies["weight"].stride() == expected.stride()
    assert (copies["count"].item(), copies["rate"].item()) == (3, 0.5)


def test_training_goes_on_during_a_save_which_holds_the_state_of_its_own_step(
    make_session: MakeSession, gpipe: Any, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(*WORDS, "checkpoint_every=2")
    before_step(session, 4, lambda: weights.append(copy_to_cpu(session.pipe.state_dict())), monkeypatch)
    # The fifth step is done while the save of step 4 cannot even end its first file.
    weights: list[Mapping[str, Tensor]] = []
    held: list[bool] = []

    def look() -> None:
        held.append(disk.held.wait(LIMIT_S) and steps(tmp_path) == [])
        disk.free.set()

    before_step(session, 5, look, monkeypatch)
    outcome = trainer(session, tmp_path).run()
    assert (outcome.steps, held, steps(tmp_path)) == (6, [True], [4, 6])
    assert threading.main_thread() not in disk.threads
    saved = checkpoints.load(tmp_path / "checkpoints" / "step-00000004")
    assert gpipe.same_tensors({k[6:]: v for k, v in saved.items() if k.startswith("model/")}, dict(weights[0]))
    # The same in a run that stops there, optimizer and average included; and not what came of it.
    trainer(make_session(*WORDS, "steps=4"), tmp_path / "stopped").run()
    assert gpipe.same_tensors(saved, checkpoints.load(tmp_path / "stopped" / "checkpoints" / "step-00000004"))
    last = checkpoints.load(tmp_path / "checkpoints" / "step-00000006")
    assert not any(torch.equal(saved[key], last[key]) for key in saved if key.startswith(("model/head", "ema/head")))


def test_a_save_waits_for_the_one_before(
    make_session: MakeSession, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(*WORDS)
    before_step(session, 3, lambda: None if disk.held.wait(LIMIT_S) else pytest.fail("nothing is saved"), monkeypatch)
    waits: list[list[int]] = []
    wait = BackgroundSaver.wait

    def watched_wait(saver: BackgroundSaver) -> None:
        # The next save begins while the disk is held; were it not to wait, it would clear the other's folder away.
        if saver._thread is not None and not disk.free.is_set():
            waits.append(steps(tmp_path))
            disk.free.set()
        wait(saver)

    monkeypatch.setattr(BackgroundSaver, "wait", watched_wait)
    trainer(session, tmp_path).run()
    assert waits == [[]]
    assert steps(tmp_path) == [2, 4, 6]
    for path in (tmp_path / "checkpoints").iterdir():
        checkpoints.check_whole(path)


def test_a_disk_that_fills_up_stops_the_run_at_the_next_step(
    make_session: MakeSession, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.free.set()
    session = make_session(*WORDS)
    running = trainer(session, tmp_path)

    def fill() -> None:
        running._saver.wait()
        disk.broken = True

    def until_failed() -> None:
        thread = running._saver._thread
        assert thread is not None
        thread.join(LIMIT_S)

    before_step(session, 3, fill, monkeypatch)
    before_step(session, 4, until_failed, monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        running.run()
    assert str(caught.value).endswith("checkpoints/step-00000004: rank 0: No space left on device")
    assert session.pipe.step == 5
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    checkpoints.check_whole(tmp_path / "checkpoints" / "step-00000002")


def test_a_disk_that_fills_up_at_the_end_fails_the_run(make_session: MakeSession, disk: Disk, tmp_path: Path) -> None:
    disk.broken = True
    disk.free.set()
    with pytest.raises(CheckpointError, match="step-00000001: rank 0: No space left on device"):
        trainer(make_session("steps=1"), tmp_path).run()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_training_that_fails_leaves_the_checkpoint_under_way_whole(
    make_session: MakeSession, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(*WORDS)

    def fail() -> None:
        assert disk.held.wait(LIMIT_S)
        threading.Timer(0, disk.free.set).start()
        raise TrainingError("no more")

    before_step(session, 3, fail, monkeypatch)
    with pytest.raises(TrainingError, match="no more"):
        trainer(session, tmp_path).run()
    assert steps(tmp_path) == [2]


def test_an_interruption_gives_up_the_save_and_leaves_nothing_under_a_final_name(
    make_session: MakeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing is stopped at its first tensor, and not let on before the program has been interrupted."""
    session = make_session(*WORDS)
    writing, interrupted = threading.Event(), threading.Event()
    save = torch.save

    def slow_save(*args: Any, **kwargs: Any) -> None:
        writing.set()
        assert interrupted.wait(LIMIT_S)
        save(*args, **kwargs)

    give_up = BackgroundSaver.give_up

    def watched_give_up(saver: BackgroundSaver) -> None:
        saver._cancelled.set()
        interrupted.set()
        give_up(saver)

    def interrupt() -> None:
        assert writing.wait(LIMIT_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", slow_save)
    monkeypatch.setattr(BackgroundSaver, "give_up", watched_give_up)
    before_step(session, 3, interrupt, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        trainer(session, tmp_path).run()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def _two_ranks(make_session: MakeSession, run_dir: Path, failing: bool) -> tuple[int, bool, str]:
    """Rank 1's disk is held until both have done more steps; returns steps done, whether it was held, the error."""
    patch = pytest.MonkeyPatch()
    session = make_session(*WORDS, "checkpoint_every=2", "partitions=2")
    disk = Disk(patch)
    held = []

    def look() -> None:
        held.append(disk.held.wait(LIMIT_S) and not list((run_dir / "checkpoints").glob("step-*")))
        dist.barrier()  # both are here, in the sixth step
        disk.broken = failing and dist.get_rank() == 1
        disk.free.set()

    if dist.get_rank() == 0:
        disk.free.set()
    before_step(session, 5, look, patch)
    try:
        trainer(session, run_dir).run()
    except CheckpointError as error:
        return session.pipe.step, held == [True], str(error)
    return session.pipe.step, held == [True], ""


def test_all_ranks_train_on_while_one_of_them_writes(
    make_session: MakeSession, gpipe: Any, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert run_ranks(2, _two_ranks, make_session, tmp_path / "two", False) == [(6, True, "")] * 2
    assert steps(tmp_path / "two") == [4, 6]
    trainer(make_session(*WORDS, "steps=4"), tmp_path / "one").run()
    name = "checkpoints/step-00000004"
    assert gpipe.same_tensors(checkpoints.load(tmp_path / "two" / name), checkpoints.load(tmp_path / "one" / name))


def test_when_one_rank_cannot_write_all_fail_with_its_reason(
    make_session: MakeSession, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    outcomes = run_ranks(2, _two_ranks, make_session, tmp_path, True)
    problem = f"{tmp_path}/checkpoints/step-00000004: rank 1: No space left on device"
    assert outcomes == [(6, True, problem)] * 2
    assert list((tmp_path / "checkpoints").iterdir()) == []
