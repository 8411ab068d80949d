"""A configuration as the bench sees it: processes of its own, and a line to the first of them.

The bench forks a child, which calls the launcher as `gpipe train` would (a single rank runs in that child). So the
bench itself never computes, and every configuration starts from the same clean state. A child ends with the bench.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import socket
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.benchmark.apart import context, flush
from gpipe_cli.distributed import processes
from gpipe_cli.distributed.launch import launch
from gpipe_cli.errors import GpipeError, RankFailedError

if TYPE_CHECKING:
    from gpipe_cli.benchmark.grid import Case
    from gpipe_cli.benchmark.worker import Request
    from gpipe_cli.config_bench import BenchConfig
    from gpipe_cli.distributed.devices import RankPlan

# How long the end of a child is waited for, when it has failed or is no longer needed.
_END_LIMIT_S = 20.0


class Member:
    """Running ranks of one configuration. To be closed; `ask` raises the GpipeError that ended them."""

    def __init__(self, config: BenchConfig, case: Case, plan: RankPlan) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="gpipe-bench-")  # only this user may enter it
        address = str(Path(self._scratch.name, "line"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen(1)
        self._channel: Connection | None = None
        self._failure, theirs = multiprocessing.Pipe(duplex=False)
        flush()
        self._child = context().Process(target=_run, args=(os.getpid(), config, case, plan, address, theirs))
        self._child.start()
        theirs.close()

    def ask(self, request: Request) -> Any:
        """The answer of the first rank to a request."""
        try:
            if self._channel is None:
                self._channel = self._accept()
            self._channel.send(request)
            self._wait_for(self._channel)
            return self._channel.recv()
        except (EOFError, OSError) as error:
            raise self._cause() from error

    def close(self) -> None:
        """End the processes; no harm when they have ended."""
        if self._channel is not None:
            self._channel.close()
        self._child.join(0.0 if self._channel is None else 2.0)
        if self._child.is_alive():
            self._child.terminate()
            self._child.join(_END_LIMIT_S)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()
        self._failure.close()
        self._server.close()
        self._scratch.cleanup()

    def _accept(self) -> Connection:
        self._wait_for(self._server)
        connection, _ = self._server.accept()
        return Connection(connection.detach())

    def _wait_for(self, source: Any) -> None:
        """Until `source` can be read. Raises EOFError when the child has ended before."""
        ready = multiprocessing.connection.wait([source, self._child.sentinel])
        if source not in ready:
            raise EOFError

    def _cause(self) -> GpipeError:
        """Why the child has ended, or is about to."""
        self._child.join(_END_LIMIT_S)
        with contextlib.suppress(EOFError, OSError):
            if self._failure.poll(0):
                error: GpipeError = self._failure.recv()
                return error
        return RankFailedError(0, f"ended with exit code {self._child.exitcode} and without a message")


def _run(parent: int, config: BenchConfig, case: Case, plan: RankPlan, address: str, failure: Connection) -> None:
    """The child: the ranks of one configuration, from start to end."""
    processes.reset_signals()
    processes.die_with_parent(parent)
    from gpipe_cli.benchmark.worker import Order, serve

    try:
        launch(serve, Order(config=config, case=case, address=address), plan)
    except GpipeError as error:
        failure.send(error)
    except (EOFError, KeyboardInterrupt):  # the bench has hung up, or the user
        os._exit(1)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
