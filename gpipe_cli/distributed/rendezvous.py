"""How ranks find each other: the world that torchrun or Slurm has started, and the store where all ranks meet.

torchrun's variables are those of PyTorch's env:// method (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); of Slurm's,
those that srun sets for every task, with MASTER_ADDR and MASTER_PORT from the user.
"""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from gpipe_cli.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# How long a rank waits for the first one to open its port. On a cluster, ranks start minutes apart.
_ARRIVAL_LIMIT_S = 300.0
# How long whoever answers on the port may take to speak the store's protocol: anything but a store stays silent.
_ANSWER_LIMIT_S = 8.0


@dataclass(frozen=True, kw_only=True)
class JoinedWorld:
    """This process as one of the ranks that another launcher started."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    started_by: str  # "torchrun", "srun" or "the environment"


def find_joined_world(environ: Mapping[str, str]) -> JoinedWorld | None:
    """The world that this process has been started into, None if gpipe starts its own.

    Raises ConfigError for a variable that is missing or not a number.
    """
    if "MASTER_ADDR" not in environ:
        return None
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        started_by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
    elif "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        started_by = "srun"
    else:
        return None
    rank, world_size = _number(environ, names[0]), _number(environ, names[1])
    world = JoinedWorld(
        rank=rank,
        world_size=world_size,
        # A launcher that does not tell how many ranks share a machine: all are taken to be on this one.
        local_rank=_number(environ, names[2], rank),
        local_size=_number(environ, names[3], world_size),
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        started_by=started_by,
    )
    if not 0 <= world.rank < world.world_size:
        raise ConfigError(names[0], rank, f"expected 0 to {world_size - 1}, as {names[1]}={world_size}")
    return world


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process writes and talks to the user: alone, or the first of the ranks that were started with it."""
    world = find_joined_world(environ)
    return world is None or world.rank == 0


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigError(name, text, "expected a whole number, the same way torchrun sets it (MASTER_ADDR is set)")
    return int(text)


def requested_port(environ: Mapping[str, str]) -> int | None:
    """The port that the user wants gpipe's own launcher to meet on (MASTER_PORT), None if any free one will do.

    Raises ConfigError if it is taken.
    """
    if "MASTER_PORT" not in environ:
        return None
    port = _number(environ, "MASTER_PORT")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise _port_error(port, error) from error
    return port


def _port_error(port: int, error: Exception) -> ConfigError:
    taken = (isinstance(error, OSError) and error.errno == errno.EADDRINUSE) or "EADDRINUSE" in str(error)
    problem = "this port is already in use" if taken else "this port cannot be opened"
    return ConfigError("MASTER_PORT", port, f"{problem}; unset MASTER_PORT, or set it to a free port on every machine")


def open_store(world: JoinedWorld, timeout: timedelta) -> Store:
    """The key-value store of all ranks; rank 0 (or torchrun's agent) serves it. `timeout` is for later waits on keys.

    Raises ConfigError in under 20 s when something else listens on the port.
    """
    if world.rank != 0:
        _wait_for_listener(world)
    try:
        store = _connect(world)
    except RuntimeError as error:  # DistError, in newer versions of PyTorch
        if world.rank == 0 and world.started_by != "torchrun":
            raise _port_error(world.master_port, error) from error
        raise _no_store_error(world) from error
    store.set_timeout(timeout)
    return store


def _connect(world: JoinedWorld) -> Store:
    from torch.distributed.rendezvous import rendezvous

    answers: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()

    def connect() -> None:
        try:
            url = f"env://?rank={world.rank}&world_size={world.world_size}"
            answers.put(next(rendezvous(url, timeout=timedelta(seconds=_ANSWER_LIMIT_S)))[0])
        except Exception as error:
            answers.put(error)

    # In a thread, because PyTorch's client obeys no limit once it is connected: a silent listener would hold it.
    threading.Thread(target=connect, daemon=True).start()
    try:
        answer = answers.get(timeout=_ANSWER_LIMIT_S + 1.0)
    except queue.Empty:
        raise _no_store_error(world) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _no_store_error(world: JoinedWorld) -> ConfigError:
    problem = f"something else listens on this port of {world.master_addr}; choose one that is free there"
    return ConfigError("MASTER_PORT", world.master_port, problem)


def _wait_for_listener(world: JoinedWorld) -> None:
    deadline = time.monotonic() + _ARRIVAL_LIMIT_S
    while True:
        try:
            socket.create_connection((world.master_addr, world.master_port), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > deadline or isinstance(error, (socket.gaierror, OverflowError)):
                raise ConfigError(
                    "MASTER_ADDR",
                    world.master_addr,
                    f"no answer on MASTER_PORT={world.master_port} ({error}); check both, and that rank 0 runs",
                ) from error
            time.sleep(0.1)


def use_loopback(environ: dict[str, str] | os._Environ[str]) -> None:
    """Let Gloo talk over the loopback interface, for ranks that are all on this machine (user's choice is kept).

    Otherwise it looks up the machine's own name, which is slow or fails where that is not in any table.
    """
    if os.path.isdir("/sys/class/net/lo"):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
