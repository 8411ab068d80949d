"""One part in a process of its own: its checks one after another, each row sent as soon as it is there."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from gpipe_cli.distributed import processes
from gpipe_cli.gpu_check.place import Place, is_out_of_memory, release
from gpipe_cli.gpu_check.record import FAILED, NOT_MEASURED, CheckFailed, NotMeasured, Part, Row, first_line
from gpipe_cli.gpu_check.sizes import Sizes

# Less is no use to any row.
MIN_LEFT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the process is to do: the checks of `part` from number `first` on, until `deadline` (time.monotonic)."""

    part: Part
    first: int
    device: str
    sizes: Sizes
    deadline: float


@dataclass(frozen=True)
class Began:
    """Sent before a check: its number."""

    number: int


# Sent last. The connection's end would not do: compilers that torch.compile has started may hold it open.
DONE = "done"


@dataclass(frozen=True)
class Facts:
    """Sent once: the device by its name, with its memory, and the versions that matter to it."""

    device: str
    libraries: str


def work(connection: Connection, orders: Orders) -> None:
    """Send Facts, for each check a Began and a Row, then DONE; stop early when time is up or the device is unusable."""
    os.setsid()  # so that the processes that torch.compile starts can be ended together with this one
    processes.reset_signals()
    processes.die_with_parent(None)
    if orders.sizes.is_tiny:
        torch.set_num_threads(1)
    try:
        serve(connection, orders)
    except BrokenPipeError:  # nobody waits for the rows any more
        os._exit(1)


def serve(connection: Connection, orders: Orders) -> None:
    """The same without a process of its own."""
    place = Place(torch.device(orders.device), orders.sizes, orders.deadline)
    try:
        connection.send(facts(place.device))
    except RuntimeError as error:  # found by the driver's library, but not to be used
        connection.send(Row(orders.part.checks[orders.first].label, FAILED, {}, first_line(error)))
        connection.send(DONE)
        return
    for number in range(orders.first, len(orders.part.checks)):
        if place.left_s < MIN_LEFT_S:
            break
        connection.send(Began(number))
        row, is_usable = attempt(place, orders.part, number)
        connection.send(row)
        if not is_usable:
            break
    connection.send(DONE)


def attempt(place: Place, part: Part, number: int) -> tuple[Row, bool]:
    """The row of a check, whatever becomes of it; and whether the device is fit for another one."""
    check = part.checks[number]
    try:
        return Row(check.label, part.good, check.run(place)), True
    except CheckFailed as error:
        row, is_usable = Row(check.label, FAILED, {}, first_line(error)), True
    except NotMeasured as error:
        row, is_usable = Row(check.label, NOT_MEASURED, {}, str(error)), True
    except Exception as error:  # a row that fails must not take the others with it
        reason = first_line(error)
        if is_out_of_memory(error):
            reason = f"out of memory: {reason}"
        else:
            traceback.print_exc(file=sys.stderr)
        # An error of the device itself stays with the process: everything after it would fail too.
        is_usable = not (isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error))
        row = Row(check.label, FAILED, {}, reason)
    if is_usable:
        release(place.device)
    return row, is_usable


def facts(device: torch.device) -> Facts:
    """What the device is. Raises RuntimeError when it cannot be used."""
    if device.type != "cuda":
        return Facts("CPU", f"PyTorch {torch.__version__}")
    properties = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return Facts(
        f"{properties.name}, {properties.total_memory / 1e9:.1f} GB, compute capability "
        f"{properties.major}.{properties.minor}",
        f"CUDA {torch.version.cuda}, cuDNN {cudnn}",
    )
