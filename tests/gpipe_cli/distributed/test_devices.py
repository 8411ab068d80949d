"""Plans: how many ranks and threads, on what, and which requests are refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpipe_cli.distributed import devices
from gpipe_cli.distributed.devices import RankPlan, available_cores, plan_ranks
from gpipe_cli.errors import ConfigError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int = 0, cores: int = 8) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "available_cores", lambda: cores)


def plan(
    *,
    partitions: int = 4,
    replicas: int = 1,
    device: str = "auto",
    ranks: int | None = None,
    threads: int | None = None,
) -> RankPlan:
    return plan_ranks(partitions=partitions, replicas=replicas, device=device, ranks=ranks, threads=threads)


def test_on_cpus_every_partition_has_a_rank_and_the_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=9)
    found = plan(partitions=4)
    assert (found.num_ranks, found.num_threads) == (4, 2)
    assert (found.device_type, found.backend, found.notes) == ("cpu", "gloo", ())


def test_a_rank_has_at_least_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=2)
    assert plan(partitions=8).num_threads == 1
    assert plan(partitions=8, threads=3).num_threads == 3


@pytest.mark.parametrize(("gpus", "num_ranks"), [(1, 1), (3, 3), (8, 4)])
def test_with_gpus_no_two_ranks_share_one(monkeypatch: pytest.MonkeyPatch, gpus: int, num_ranks: int) -> None:
    machine(monkeypatch, gpus=gpus)
    found = plan(partitions=4)
    assert (found.num_ranks, found.device_type, found.backend) == (num_ranks, "cuda", "nccl")
    assert found.start_method != "fork"


def test_the_cpu_can_be_chosen_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=2)
    assert (plan(device="cpu").num_ranks, plan(device="cpu").backend) == (4, "gloo")


@pytest.mark.parametrize(
    ("ranks", "note"),
    [
        (1, "1 process hosts 4 partitions: up to 4 consecutive ones in each"),
        (3, "3 processes host 4 partitions: up to 2 consecutive ones in each"),
    ],
)
def test_a_note_says_that_ranks_host_several_partitions(monkeypatch: pytest.MonkeyPatch, ranks: int, note: str) -> None:
    machine(monkeypatch)
    assert plan(ranks=ranks).notes == (note,)


def test_replicas_multiply_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    assert plan(partitions=2, replicas=3).num_ranks == 6
    assert plan(partitions=2, replicas=3, ranks=3).num_ranks == 3
    machine(monkeypatch, gpus=5)
    assert plan(partitions=2, replicas=2).num_ranks == 4
    assert plan(partitions=2, replicas=4).num_ranks == 4


@pytest.mark.parametrize(
    ("gpus", "arguments", "message"),
    [
        (0, {"ranks": 5}, r"ranks=5: expected 1 to 4 \(partitions=4\); every process hosts"),
        (0, {"ranks": 0}, "ranks=0: expected 1 to 4"),
        (0, {"ranks": 3, "replicas": 2}, "ranks=3: expected a multiple of replicas=2 up to 8"),
        (0, {"device": "cuda"}, "device=cuda: no GPU that PyTorch can use was found; type device=cpu"),
        (2, {"ranks": 3}, "ranks=3: each rank needs its own GPU, and only 2 were found; type ranks=2"),
        (1, {"ranks": 3}, "ranks=3: each rank needs its own GPU, and only 1 was found; type ranks=1"),
        (0, {"threads": 0}, "threads=0: expected a whole number of 1 or more"),
    ],
)
def test_impossible_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: int, arguments: dict[str, object], message: str
) -> None:
    machine(monkeypatch, gpus=gpus)
    with pytest.raises(ConfigError, match="^" + message) as caught:
        plan(**arguments)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2


def test_joined_ranks_may_be_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=2, cores=8)
    torchrun = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
    for name, value in {**torchrun, "MASTER_ADDR": "first", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    assert (plan(partitions=4).num_ranks, plan(partitions=4).num_threads) == (4, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE=4: each rank needs its own GPU, and only 2 were found"):
        plan(partitions=4)


def cgroup(tmp_path: Path, membership: str, files: dict[str, str]) -> int:
    """Cores found on a machine whose control groups say so."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return available_cores(tmp_path / "proc", tmp_path / "sys")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="CPU affinity and control groups are Linux's")
class TestAvailableCores:
    @pytest.fixture(autouse=True)
    def _eight_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def test_without_control_groups_the_affinity_counts(self, tmp_path: Path) -> None:
        assert available_cores(tmp_path, tmp_path) == 8

    def test_the_tightest_quota_above_us_counts(self, tmp_path: Path) -> None:
        files = {"pod/job/cpu.max": "max 100000", "pod/cpu.max": "250000 100000", "cpu.max": "600000 100000"}
        assert cgroup(tmp_path, "0::/pod/job\n", files) == 2

    def test_in_a_container_the_path_may_be_the_hosts(self, tmp_path: Path) -> None:
        assert cgroup(tmp_path, "0::/host/only\n", {"cpu.max": "300000 100000"}) == 3

    def test_less_than_a_core_is_one(self, tmp_path: Path) -> None:
        assert cgroup(tmp_path, "0::/\n", {"cpu.max": "50000 100000"}) == 1

    def test_the_first_version_of_control_groups_counts_too(self, tmp_path: Path) -> None:
        files = {"cpu/pod/cpu.cfs_quota_us": "400000", "cpu/pod/cpu.cfs_period_us": "100000"}
        assert cgroup(tmp_path, "5:cpu,cpuacct:/pod\n3:memory:/pod\n", {**files, "cpu/cpu.cfs_quota_us": "-1"}) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("membership", "file", "text", "expected"),
    [
        ("0::/pod/job\n", "pod/memory.max", "3000000", 3_000_000),
        ("0::/pod/job\n", "pod/memory.max", "max", 8_192_000),
        ("0::/host/only\n", "memory.max", "2000000", 2_000_000),
        ("3:memory:/pod\n", "memory/pod/memory.limit_in_bytes", "1000000", 1_000_000),
        ("3:memory:/pod\n", "memory/memory.limit_in_bytes", str(2**63 - 4096), 8_192_000),
    ],
)
def test_memory_is_what_is_built_in_or_what_the_control_groups_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, membership: str, file: str, text: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2000}.__getitem__)
    for path, content in ((tmp_path / "proc/self/cgroup", membership), (tmp_path / "sys" / file, text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert devices.total_memory_bytes(tmp_path / "proc", tmp_path / "sys") == expected


def test_counting_gpus_leaves_cuda_uninitialised() -> None:
    import torch

    devices.count_gpus()
    assert not torch.cuda.is_initialized()
