"""Which processes a run needs and what each computes on: the machine's cores and GPUs against what was asked for.

Nothing here initialises CUDA: GPUs are counted through the driver's management library (torch.cuda.device_count),
so that the launcher may still fork afterwards.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpipe_cli.distributed.rendezvous import find_joined_world
from gpipe_cli.errors import ConfigError

DeviceType = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]
StartMethod = Literal["fork", "spawn", "forkserver"]


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """How many ranks run, on what, and how they are started; `notes` are lines for the user."""

    num_ranks: int
    num_threads: int
    device_type: DeviceType
    backend: Backend
    start_method: StartMethod
    notes: tuple[str, ...] = ()


def plan_ranks(*, partitions: int, replicas: int, device: str, ranks: int | None, threads: int | None) -> RankPlan:
    """The processes of a run.

    `device` is "auto" (GPUs if there are any), "cpu" or "cuda". `ranks` counts all processes of the run; None means one
    per partition and replica, but with CUDA no more than this machine has GPUs (under torchrun or Slurm the ranks may
    be on several machines, so there all are expected). `threads` is per rank; None shares this machine's cores out.

    Raises ConfigError when no such plan exists.
    """
    world = find_joined_world(os.environ)  # its ranks may be on several machines
    num_gpus = 0 if device == "cpu" else count_gpus()
    if device == "cuda" and num_gpus == 0:
        raise ConfigError(
            "device", device, "no GPU that PyTorch can use was found; type device=cpu, or check nvidia-smi and PyTorch"
        )
    device_type: DeviceType = "cuda" if num_gpus else "cpu"

    num_stages = partitions * replicas
    if ranks is not None:
        num_ranks = ranks
    else:
        num_ranks = num_stages if device_type == "cpu" or world else min(num_stages, num_gpus)
        num_ranks -= num_ranks % replicas if num_ranks >= replicas else 0
    _check_num_ranks(num_ranks, partitions, replicas)
    if device_type == "cuda" and (world is None or world.started_by == "torchrun"):
        _check_gpus(num_ranks if world is None else world.local_size, num_gpus, joined=world is not None)

    if threads is not None and threads < 1:
        raise ConfigError("threads", threads, "expected a whole number of 1 or more")
    num_local_ranks = num_ranks if world is None else world.local_size
    notes = []
    if num_ranks < num_stages:
        most = math.ceil(num_stages / num_ranks)
        hosts = "1 process hosts" if num_ranks == 1 else f"{num_ranks} processes host"
        notes.append(f"{hosts} {num_stages} partitions: up to {most} consecutive ones in each")
    return RankPlan(
        num_ranks=num_ranks,
        num_threads=threads or max(1, available_cores() // num_local_ranks),
        device_type=device_type,
        backend="nccl" if device_type == "cuda" else "gloo",
        start_method=_start_method(device_type),
        notes=tuple(notes),
    )


def _check_num_ranks(num_ranks: int, partitions: int, replicas: int) -> None:
    most = partitions * replicas
    allowed = (
        f"1 to {most} (partitions={partitions})" if replicas == 1 else f"a multiple of replicas={replicas} up to {most}"
    )
    if not 1 <= num_ranks <= most or num_ranks % replicas:
        raise ConfigError("ranks", num_ranks, f"expected {allowed}; every process hosts one partition or more")


def _check_gpus(num_local_ranks: int, num_gpus: int, *, joined: bool) -> None:
    if num_local_ranks > num_gpus:
        key, remedy = (
            ("LOCAL_WORLD_SIZE", "start torchrun with --nproc-per-node=") if joined else ("ranks", "type ranks=")
        )
        found = "only 1 was" if num_gpus == 1 else f"only {num_gpus} were"
        raise ConfigError(key, num_local_ranks, f"each rank needs its own GPU, and {found} found; {remedy}{num_gpus}")


def _start_method(device_type: DeviceType) -> StartMethod:
    """Fork where it is safe, being twenty times as fast as the others (DESIGN, Start-up).

    CUDA does not survive a fork once it is initialised, and a library may have done that behind our back. The
    forkserver imports torch before it forks, so that is paid once and not by every rank.
    """
    if sys.platform != "linux":
        return "spawn"
    return "forkserver" if device_type == "cuda" else "fork"


def count_gpus() -> int:
    """Number of CUDA devices visible to this process, found without initialising CUDA."""
    import torch

    return torch.cuda.device_count()


def available_cores(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: the smaller of its CPU affinity and the quota of its control groups (at least 1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_limit(proc / "self" / "cgroup", cgroup_root, "cpu", _quota_v1, _quota_v2)
    return max(1, math.floor(min(cores, quota)))


def total_memory_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this machine's processes may use together: what is built in, or the limit of the control groups."""
    built_in = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit(
        proc / "self" / "cgroup",
        cgroup_root,
        "memory",
        lambda folder: _bytes_in(folder / "memory.limit_in_bytes"),
        lambda folder: _bytes_in(folder / "memory.max"),
    )
    return int(min(built_in, limit))


def _cgroup_limit(
    membership: Path, root: Path, controller: str, read_v1: Callable[[Path], float], read_v2: Callable[[Path], float]
) -> float:
    """What the control groups allow of something, infinity if they set no limit; versions 2 and 1 of the interface."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    limit = math.inf
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        # Inside a container the path may name the host's tree: what exists of it, and always the mounted root, counts.
        relative = Path(group.lstrip("/"))
        for folder in (base / part for part in (relative, *relative.parents)):
            limit = min(limit, read_v1(folder) if controllers else read_v2(folder))
    return limit


def _bytes_in(path: Path) -> float:
    try:
        text = path.read_text().strip()
        return math.inf if text == "max" else int(text)
    except (OSError, ValueError):
        return math.inf


def _quota_v2(folder: Path) -> float:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return math.inf if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf


def _quota_v1(folder: Path) -> float:
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return math.inf if limit < 0 else limit / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return math.inf
