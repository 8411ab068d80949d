"""What a result was made with: versions and machine. Imports torch when asked."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import gpipe_cli

_PACKAGES = ("torchvision", "timm", "numpy")


@dataclass(frozen=True)
class Machine:
    """CPU model, cores that this process may use, and names of the GPUs that it used (empty: none)."""

    cpu: str
    num_cores: int
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        if not self.gpus:
            return f"{self.cpu}, {self.num_cores} cores"
        return ", ".join(f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus))


def versions() -> dict[str, str]:
    """Versions of gpipe, Python and the packages that results depend on."""
    import torch

    # torch's own text also tells the CUDA that it was built for.
    found = {"gpipe": gpipe_cli.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(device_type: str) -> Machine:
    """The machine of this process. `device_type` is what the run computed on, "cpu" or "cuda"."""
    gpus: tuple[str, ...] = ()
    if device_type == "cuda":
        import torch

        gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Machine(cpu=_cpu_model(), num_cores=_num_cores(), gpus=gpus)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].replace("(R)", "").replace("(TM)", "").split())
    return platform.processor() or platform.machine() or "unknown CPU"
