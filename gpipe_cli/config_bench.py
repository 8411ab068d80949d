"""The settings of `gpipe bench`. Six of them take one value or a list: every combination is a row to be measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gpipe_cli.checks import check_made_up_input, check_model
from gpipe_cli.config import SCHEDULE_HELP, TAPER_HELP, ModelConfig, OptimizerConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.fields import about, one_or_more, setting


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """`gpipe bench`: the grid, what its rows share, and how they are measured."""

    command: str = setting("the command that runs")
    model: ModelConfig = field(metadata=about("the network"))
    optimizer: OptimizerConfig = field(metadata=about("the optimizer"))
    suite: str | None = setting("which rows; chosen by suite=NAME", default=None)
    partitions: tuple[int, ...] | None = one_or_more(
        "parts that the model is cut into (the paper's K); null: the suite's, or [1,2]", at_least=1
    )
    micro_batches: tuple[int, ...] | None = one_or_more(
        "parts of a mini-batch (the paper's M); null: the suite's, or [1,4,8]", at_least=1
    )
    remat: tuple[Literal["full", "except_last", "none", "auto"], ...] | None = one_or_more(
        "re-materialization: recompute activations in the backward pass to save memory; "
        "auto: keep what fits into memory_gb, recompute the rest; null: the suite's, or [full,none]"
    )
    schedule: tuple[Literal["gpipe", "1f1b", "eager_1f1b", "zero_bubble", "interleaved"], ...] = one_or_more(
        SCHEDULE_HELP
    )
    taper: tuple[bool, ...] = one_or_more(TAPER_HELP)
    baseline: tuple[Literal["single", "naive", "torch"], ...] | None = one_or_more(
        "what each row is compared with, measured in turn with it: single: an ordinary PyTorch loop on all cores; "
        "naive: the partitions without pipelining, one micro-batch; torch: torch.distributed.pipelining's ScheduleGPipe"
    )
    batch_size: int | None = setting(
        "samples in a mini-batch, one optimizer step; null: the suite's, or 32", at_least=1
    )
    image_size: int | None = setting(
        "height and width of the input in pixels; null: the suite's, or 64; text has none", at_least=1
    )
    num_classes: int | None = setting(
        "classes of the generated labels; null: 1000; a Transformer's are its tokens", at_least=2
    )
    steps: int = setting("measured optimizer steps of a row", at_least=1)
    warmup_steps: int = setting("steps before them, which do not count", at_least=2)
    rounds: int = setting("parts that a row's steps are measured in, in turn with the rows beside it", at_least=1)
    seed: int = setting("seed of the weights and the generated data", at_least=0, below=2**32)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: GPUs when there are any, else the CPU")
    precision: Literal["fp32", "bf16"] = setting("bf16: automatic mixed precision, weights stay fp32")
    balance: tuple[int, ...] | None = setting("layers in each partition, [5,4]; null: by cost", at_least=1)
    cut: Literal["flops", "time"] | None = setting(
        "cost of a layer for the automatic balance: counted, or its time on this machine; null: time"
    )
    ranks: int | None = setting("processes; null: one per partition on CPU, at most one per GPU on CUDA", at_least=1)
    threads: int | None = setting("CPU threads of each rank; null: the cores shared out", at_least=1)
    channels_last: bool = setting("channels-last memory format, faster for convolutions")
    memory_gb: float | None = setting(
        "memory that each rank may use, in GB: a limit on GPUs; on a CPU only what remat=auto keeps depends on it; "
        "null: what is free on its GPU, on a CPU the machine's shared out",
        above=0,
    )
    trace: bool = setting("draw what every rank did when: a picture and a Perfetto trace for each row")
    results_dir: str = setting("folder of the tables, the speed-up plot and of runs/")
    run_dir: str | None = setting("folder of the traces; null: a new one below results_dir/runs")
    progress: Literal["auto", "bar", "plain", "none"] = setting("auto: a bar on a terminal, else plain lines")

    def check(self) -> None:
        """Raises ConfigError for settings that no row could use. A single row that is impossible is no error here."""
        _check(self)


def _check(config: BenchConfig) -> None:
    check_made_up_input(config.model, config.image_size, config.num_classes)
    check_model(config.model, config.image_size)
    if config.rounds > config.steps:
        problem = f"there are only steps={config.steps} to divide; use rounds={config.steps} or less, or more steps"
        raise ConfigError("rounds", config.rounds, problem)
    if config.balance is not None and len(config.balance) not in (config.partitions or ()):
        problem = f"names {len(config.balance)} partitions; add partitions={len(config.balance)}, or leave balance out"
        raise ConfigError("balance", config.balance, problem)
    if config.balance is not None and config.cut is not None:
        raise ConfigError("cut", config.cut, "is the cost for the automatic balance; leave out either cut or balance")
    if config.run_dir is not None and not config.trace:
        raise ConfigError("run_dir", config.run_dir, "holds the traces; add trace=true, or leave it out")
