"""Saving while training goes on: the training thread copies the tensors, another thread writes the copies.

The ranks agree about a save over a process group that only their writing threads use, one save at a time and in the
same order on every rank, so nothing of it can meet the traffic of training. The writing thread computes nothing and
touches no GPU. Data-loading processes may be forked meanwhile: they use none of the locks that it may hold, and
whatever it imports has been imported before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_cli.distributed.local import OPERATION_LIMIT
from gpipe_cli.training import checkpoint_storage

if TYPE_CHECKING:
    from gpipe_cli.pipeline import ProcessGroups

# Called with copies of the tensors, `process_group` and `cancelled`, as `checkpoints.save` takes them.
Write = Callable[..., object]


class BackgroundSaver:
    """One save at a time beside the training. Making one is collective over the ranks of `groups`, and so is `start`.

    A save that has failed shows, with the error that it raised, at the next `check`, `start` or `wait`. As a context
    it ends with a save whole or failed, also when training fails: a checkpoint under way is of a good step. Only an
    interruption gives it up.
    """

    def __init__(self, groups: ProcessGroups | None) -> None:
        self._group: dist.ProcessGroup | None = None
        if groups is not None:
            # The slowest rank may write for longer than Gloo's half an hour. A dead one is noticed at once.
            group = dist.new_group(
                list(groups.ranks), timeout=OPERATION_LIMIT, backend="gloo", use_local_synchronization=True
            )
            self._group = cast(dist.ProcessGroup, group)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._cancelled = threading.Event()

    def start(self, tensors: Mapping[str, Tensor], write: Write) -> None:
        """Copy the tensors and have `write(copies, process_group=…, cancelled=…)` called in another thread.

        Waits for the save before, if it is still under way, and raises what that one raised.
        """
        self.wait()
        checkpoint_storage.accept_no_process_group()
        copies = copy_to_cpu(tensors)
        # A daemon: should the program end in a hurry, it is not to wait for the disk.
        self._thread = threading.Thread(target=self._run, args=(copies, write), name="saving", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a save that has failed. Returns at once."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way, if there is one; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def give_up(self) -> None:
        """End the save under way as soon as possible; a part of it may be left under a temporary name."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception):
            self.wait()
        else:
            self.give_up()

    def _run(self, copies: Mapping[str, Tensor], write: Write) -> None:
        try:
            write(copies, process_group=self._group, cancelled=self._cancelled)
        except BaseException as error:  # whatever it is belongs to the training thread
            self._failure = error


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the memory of this process, same layout and dtype: what happens to the tensors no longer matters.

    From a GPU through pinned memory, which PyTorch keeps for the next time.
    """
    copies, devices = {}, set()
    for key, tensor in tensors.items():
        from_gpu = tensor.device.type == "cuda"
        copies[key] = torch.empty_like(tensor, device="cpu", pin_memory=from_gpu, requires_grad=False)
        copies[key].copy_(tensor.detach(), non_blocking=from_gpu)
        if from_gpu:
            devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies
