"""The settings of `gpipe plan` as frozen dataclasses; the groups `model` and `optimizer` are those of `gpipe train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gpipe_cli.checks import check_made_up_input, check_model, check_taper
from gpipe_cli.config import SCHEDULE_HELP, TAPER_HELP, ModelConfig, OptimizerConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.fields import about, setting

_SET_BY_SUITE = {
    "partitions": "auto", "micro_batches": "auto", "ranks": None, "threads": None, "remat": "full", "balance": None,
    "timeline": None, "taper": False,
}  # fmt: skip
_SUITE_MODEL = ("amoebanet", "D", 18, 256)  # what conf/suite/ chooses: model=amoebanet_d as it is


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Group `hardware`: one accelerator and the link to the next. GB is 10^9 bytes."""

    name: str = setting("which accelerator; chosen by hardware=NAME")
    memory_gb: float | None = setting("memory of an accelerator; null: measured (cpu only)", above=0)
    fp32_tflops: float | None = setting("peak rate in float32, 10^12 operations/s; null: measured (cpu only)", above=0)
    bf16_tflops: float | None = setting("peak rate in bfloat16; null: it has none (cpu: measured)", above=0)
    memory_gb_per_s: float | None = setting("memory bandwidth; null: measured (cpu only)", above=0)
    link_gb_per_s: float | None = setting("bandwidth to the next accelerator; null: measured (cpu only)", above=0)
    link_latency_us: float | None = setting("time until the first byte arrives; null: measured (cpu only)", at_least=0)
    efficiency: float = setting("share of the peak rate that is reached", above=0, at_most=1)
    op_overhead_us: float | None = setting("fixed time of an operation; null: measured (cpu only)", at_least=0)
    reserved_gb: float = setting("memory that is taken before the network", at_least=0)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """`gpipe plan`: the three groups and the settings at the top level."""

    command: str = setting("the command that runs")
    model: ModelConfig = field(metadata=about("the network"))
    optimizer: OptimizerConfig = field(metadata=about("the optimizer"))
    hardware: HardwareConfig = field(metadata=about("the accelerators"))
    suite: str | None = setting("which table's columns, in place of the settings; chosen by suite=NAME", default=None)
    partitions: int | Literal["auto"] = setting("parts of the network (the paper's K); auto: the fastest", at_least=1)
    micro_batches: int | Literal["auto"] = setting(
        "parts of a mini-batch (the paper's M); auto: the fastest", at_least=1
    )
    ranks: int | None = setting("accelerators that share the partitions; null: one for each partition", at_least=1)
    accelerators: int = setting("the most that partitions=auto may use; on the CPU, no more than its cores", at_least=1)
    threads: int | None = setting("CPU threads of each rank, hardware=cpu only; null: the cores shared out", at_least=1)
    batch_size: int = setting("samples in a mini-batch, one optimizer step", at_least=1)
    image_size: int | None = setting("height and width of the input in pixels; null: 224; text has none", at_least=1)
    num_classes: int | None = setting(
        "classes of the classifier; null: 1000; a Transformer's are its tokens", at_least=1
    )
    precision: Literal["fp32", "bf16"] = setting("bf16: automatic mixed precision, weights stay fp32")
    remat: Literal["full", "except_last", "none", "auto"] = setting(
        "re-materialization: recompute activations in the backward pass; auto: keep what fits, recompute the rest"
    )
    schedule: Literal["gpipe", "1f1b", "eager_1f1b", "zero_bubble", "interleaved"] = setting(SCHEDULE_HELP)
    taper: bool = setting(TAPER_HELP)
    balance: tuple[int, ...] | None = setting("layers in each partition, [5,4]; null: by cut", at_least=1)
    cut: Literal["flops", "time", "memory"] = setting(
        "what the largest partition has least of: flops: predicted time; memory: bytes; time: measured here (cpu), "
        "and then the partitions are timed in short steps"
    )
    bytes_per_parameter: int | None = setting(
        "weight, gradient and optimizer together; null: 4 + 4 + 4 for each value that the optimizer keeps", at_least=1
    )
    timeline: str | None = setting("file for a picture (.png) or trace (.json) of the simulated step; null: none")
    results_dir: str = setting("folder of the table that a suite writes, plan.csv and plan.md")

    def check(self) -> None:
        """Raises ConfigError for the first pair of settings in conflict."""
        check_made_up_input(self.model, self.image_size, self.num_classes)
        check_model(self.model, self.image_size)
        if self.suite is not None:
            self._check_suite()
        self._check_pipeline()
        self._check_hardware()

    def _check_suite(self) -> None:
        """What every row of a suite sets for itself must not be asked for, and then not be done."""
        problem = f"suite={self.suite} sets it for every row; leave one of them out"
        for name, neutral in _SET_BY_SUITE.items():
            if getattr(self, name) != neutral:
                raise ConfigError(name, getattr(self, name), problem)
        if self.hardware.name != "cpu":
            raise ConfigError("hardware", self.hardware.name, problem)
        if (self.model.name, self.model.variant, self.model.layers, self.model.filters) != _SUITE_MODEL:
            raise ConfigError("model", self.model.name, problem)

    def _check_pipeline(self) -> None:
        if isinstance(self.micro_batches, int) and self.micro_batches > self.batch_size:
            problem = f"there are only batch_size={self.batch_size} samples to split; use at most that, or auto"
            raise ConfigError("micro_batches", self.micro_batches, problem)
        if isinstance(self.micro_batches, int):
            check_taper(self.taper, self.micro_batches, self.batch_size)
        if self.balance is not None and self.partitions != len(self.balance):
            problem = f"names {len(self.balance)} partitions but partitions={self.partitions}; make them equal"
            raise ConfigError("balance", self.balance, problem)
        if self.ranks is not None and self.partitions == "auto":
            raise ConfigError("ranks", self.ranks, "give partitions as well; for partitions=auto use accelerators")
        if self.ranks is not None and isinstance(self.partitions, int) and self.ranks > self.partitions:
            problem = f"there is work for partitions={self.partitions} ranks only; use that or less"
            raise ConfigError("ranks", self.ranks, problem)
        if self.schedule == "interleaved" and (self.ranks is None or self.partitions == self.ranks):
            problem = "deals several partitions to each rank; give ranks=R and a multiple of R as partitions"
            raise ConfigError("schedule", self.schedule, problem)

    def _check_hardware(self) -> None:
        hardware = self.hardware
        if hardware.name != "cpu":
            if self.threads is not None:
                raise ConfigError("threads", self.threads, f"hardware={hardware.name} has none; use hardware=cpu")
            missing = ("memory_gb", "fp32_tflops", "memory_gb_per_s", "link_gb_per_s", "link_latency_us")
            for name in (*missing, "op_overhead_us"):
                if getattr(hardware, name) is None:
                    raise ConfigError(f"hardware.{name}", None, "only hardware=cpu can be measured; give a number")
            if self.cut == "time":
                problem = f"measures layers here, but hardware={hardware.name}; use cut=flops, or hardware=cpu"
                raise ConfigError("cut", self.cut, problem)
            if self.precision == "bf16" and hardware.bf16_tflops is None:
                problem = f"hardware={hardware.name} has no bfloat16 units; use precision=fp32"
                raise ConfigError("precision", self.precision, problem)
