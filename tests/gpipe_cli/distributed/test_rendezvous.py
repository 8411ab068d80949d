"""Which environment counts as another launcher's, and what is wrong with one."""

from __future__ import annotations

import pytest

from gpipe_cli.distributed.rendezvous import find_joined_world, requested_port
from gpipe_cli.errors import ConfigError

MEETING_POINT = {"MASTER_ADDR": "first.example", "MASTER_PORT": "1234"}
RANKS = {"RANK": "5", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        MEETING_POINT,
        RANKS,  # left over in a shell
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},  # an interactive job
    ],
)
def test_half_an_environment_is_nobodys(environ: dict[str, str]) -> None:
    assert find_joined_world(environ) is None


def test_torchrun_is_recognised() -> None:
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
    world = find_joined_world({**MEETING_POINT, **RANKS, **local})
    assert world is not None
    assert (world.rank, world.world_size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert (world.started_by, world.master_addr, world.master_port) == ("torchrun", "first.example", 1234)


def test_slurm_is_recognised() -> None:
    world = find_joined_world({**MEETING_POINT, "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"})
    assert world is not None
    assert (world.rank, world.world_size, world.local_rank, world.started_by) == (3, 8, 1, "srun")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"MASTER_PORT": "http"}, "^MASTER_PORT=http: expected a whole number"),
        ({"RANK": "-1"}, "^RANK=.?-1.?: expected a whole number"),
        ({"RANK": "8"}, "^RANK=8: expected 0 to 7, as WORLD_SIZE=8"),
        ({"LOCAL_RANK": ""}, "^LOCAL_RANK=('')?: expected a whole number"),
    ],
)
def test_a_wrong_variable_is_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_joined_world({**MEETING_POINT, **RANKS, **changed})


def test_a_missing_port_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^MASTER_PORT=null: "):
        find_joined_world({"MASTER_ADDR": "localhost", **RANKS})


def test_a_port_is_only_wanted_if_named() -> None:
    assert requested_port({}) is None


@pytest.mark.parametrize("port", ["70000", "many"])
def test_an_impossible_port_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=f"^MASTER_PORT=.?{port}.?: "):
        requested_port({"MASTER_PORT": port})
