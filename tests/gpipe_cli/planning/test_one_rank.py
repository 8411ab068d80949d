"""A rank of a plan that no single machine could hold builds its own layers and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("run_one_rank.py")
# 5.3 billion parameters on 8 accelerators: PAPER, Table 1, Pipeline-8.
PLAN = ("model=transformer_5b", "partitions=8", "micro_batches=8", "hardware=tpu_v3")
BLOCK = 50_350_080  # parameters of a block: 12 x 2048^2, biases of 8192 + 2048, two norms of 2 x 2048

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")


def start(device: str, rank: int, num_samples: int) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), device, str(rank), str(num_samples), *PLAN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("rank", "parameters", "output"),
    [(3, 13 * BLOCK, [2, 1024, 2048]), (7, 12 * BLOCK + 2 * 2048 + 2049 * 32_000, [2, 1024, 32_000])],
)
def test_one_rank_of_eight_has_its_share_of_5_billion_parameters(rank: int, parameters: int, output: list[int]) -> None:
    found = start("meta", rank, 2)
    assert found["built"] == found["planned"] == parameters
    assert found["network"] == pytest.approx(5.3e9, rel=0.005)
    assert found["output"] == output
    assert found["layers"][0] == {3: "block_39", 7: "block_91"}[rank]
    assert found["peak_memory_bytes"] < 2**30


@pytest.mark.skipif(
    "GPIPE_REAL_RANK" not in os.environ,
    reason="builds 2.6 GB of weights and computes for a minute; GPIPE_REAL_RANK=1 runs it",
)
def test_one_rank_of_eight_computes_in_the_memory_of_its_own_layers() -> None:
    found = start("cpu", 3, 1)
    print(found)
    assert found["built"] == found["planned"] == 13 * BLOCK
    assert 4 * found["built"] < found["peak_memory_bytes"] < 2 * 4 * found["built"]
