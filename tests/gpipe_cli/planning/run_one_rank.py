"""Starts one rank of a planned pipeline, without the others: run_one_rank.py DEVICE RANK SAMPLES [SETTING ...].

Prints a line of JSON: what the plan has for the rank, what it built, and what one forward pass gave. The address space
is limited to that of a machine with 24 GiB. It goes through gpipe's engine; what stands in for the other ranks are
process groups that answer at once (torch's "fake" backend).
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_cli.compose import load
from gpipe_cli.pipeline import Pipeline
from gpipe_cli.pipeline.transport import ProcessGroups
from gpipe_cli.planning.network import make_planner, sample_of
from gpipe_cli.training.networks import build_network

LIMIT_BYTES = 24 * 2**30


def main(device: str, rank: int, num_samples: int, settings: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    torch.set_num_threads(1)
    config = load("plan", settings)
    planner = make_planner(config)
    plan = planner.evaluate(planner.first_choice())
    num_ranks = plan.schedule.num_ranks
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    groups = ProcessGroups(tuple(range(num_ranks)), group, group, group, group)
    layers = build_network(config.model, config.model.vocab_size, None, 0)

    began = time.perf_counter()
    with torch.device("meta") if device == "meta" else contextlib.nullcontext():
        pipe = Pipeline(
            layers,
            plan.choice.partitions,
            plan.choice.micro_batches,
            loss_fn=lambda outputs, targets: outputs.mean(),
            balance=plan.balance,
            device=device,
            groups=groups,
        )
    built = time.perf_counter()
    value = sample_of(config, num_samples, torch.device(device))
    if rank > 0:  # what the rank before would have sent
        value = torch.ones(*value.shape, config.model.width, device=device)
    with torch.no_grad():
        for layer in pipe.module.children():
            value = layer(value)
    print(
        json.dumps(
            {
                "planned": plan.stages[rank].num_parameters,
                "built": sum(parameter.numel() for parameter in pipe.parameters()),
                "network": plan.num_parameters,
                "layers": [name for name, _ in pipe.module.named_children()],
                "output": list(value.shape),
                "build_s": round(built - began, 2),
                "forward_s": round(time.perf_counter() - built, 2),
                "peak_memory_bytes": peak_memory_bytes(),
            }
        )
    )


def peak_memory_bytes() -> int:
    """Not ru_maxrss: a child's begins with that of the process it was forked from."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
