"""The settings of a run as frozen dataclasses: what everything below the command line sees instead of a Hydra config.

Values come from the YAML files in `conf/` and from the command line; types, choices, bounds and the help text are here.
Only settings that not every choice of a group has (`dataset.path`) carry a default: the neutral value elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpipe_cli.checks import check_together
from gpipe_cli.fields import about, read, setting

SCHEDULE_HELP = (
    "order of the micro-batches in the pipeline: gpipe: all forward passes, then all backward passes; 1f1b: backward "
    "passes as early as possible, holds at most K micro-batches; eager_1f1b: runs further ahead, so that the first "
    "partition hardly waits and gets more layers, holds up to 3K-2; zero_bubble: as far ahead, and "
    "the gradients of weights come last where others wait for those of inputs; interleaved: several stages to each "
    "process"
)
TAPER_HELP = (
    "smaller first and last micro-batches, larger ones between: the pipeline fills and drains in less time; for 1f1b "
    "and eager_1f1b, gpipe gets slower"
)
SMALL_STEM_BELOW = 64  # pixels: the ImageNet stem divides the resolution by eight


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Group `model`."""

    name: Literal["amoebanet", "transformer", "module"] = setting("which network; chosen by model=NAME")
    variant: Literal["B", "D"] = setting("AmoebaNet's evolved cells, B or D", default="D")
    layers: int = setting("normal cells or Transformer blocks, the paper's L", default=6, at_least=1)
    filters: int = setting("filters of the first normal cells, the paper's D; a multiple of 4", default=64, at_least=4)
    stem: Literal["auto", "imagenet", "small"] = setting(
        "imagenet: stride-2 convolution and two reduction cells; small: a stride-1 convolution; "
        "auto: small below 64 pixels, else imagenet",
        default="auto",
    )
    dropout: float = setting(
        "share dropped: before the classifier, or in a Transformer's blocks", default=0.0, at_least=0, below=1
    )
    drop_path: float = setting("share of paths dropped at the end; 0: off", default=0.0, at_least=0, below=1)
    drop_path_by_depth: bool = setting("drop fewer paths in the first cells than in the last", default=False)
    split_cells: bool = setting("two layers for each cell, for a more even cut", default=False)
    aux_head: bool = setting("auxiliary classifier while training", default=False)
    aux_weight: float = setting("weight of the auxiliary classifier's loss", default=0.4, at_least=0)
    bn_momentum: float = setting("BatchNorm's running-average momentum", default=0.1, above=0, at_most=1)
    bn_eps: float = setting("BatchNorm's epsilon", default=1e-5, above=0)
    width: int = setting("numbers that stand for a token; even", default=128, at_least=2)
    num_heads: int = setting("attention heads; a divisor of the width", default=4, at_least=1)
    ff_width: int = setting("hidden units of a feed-forward network", default=512, at_least=1)
    vocab_size: int = setting("tokens that the network knows, at least the tokenizer's", default=256, at_least=2)
    seq_len: int | None = setting("tokens of a sequence: how much the network sees at once", default=None, at_least=1)
    tied: bool = setting("one matrix for the embedding and the softmax", default=False)
    factory: str | None = setting("package.module:function that returns your layers", default=None)
    kwargs: dict[str, Any] = field(
        default_factory=dict, metadata=about("arguments of the factory, model.kwargs.width=64")
    )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Group `dataset`."""

    name: Literal[
        "digits", "cifar10", "cifar100", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft", "birdsnap",
        "imagenet", "folder", "synthetic", "text",
    ] = setting("which data; chosen by dataset=NAME")  # fmt: skip
    path: str | None = setting("folder that holds the data", default=None)
    download: bool = setting("fetch the data into dataset.path when they are not there", default=False)
    image_size: int | None = setting("size in pixels when image_size is not set", at_least=1)
    augment: Literal["none", "light", "standard", "inception", "cutout"] = setting(
        "training pictures: light: shift; standard: crop and flip; inception: resized crop, flip, colour; "
        "cutout: whole picture, flip, a square blanked",
        default="none",
    )
    mean: tuple[float, float, float] = setting("mean per colour channel, of pixels in 0..1", default=(0.0, 0.0, 0.0))
    std: tuple[float, float, float] = setting(
        "standard deviation per colour channel, of pixels in 0..1", default=(1.0, 1.0, 1.0), above=0
    )
    num_classes: int | None = setting("classes of the generated pictures", default=None, at_least=2)
    size: int | None = setting("generated training pictures", default=None, at_least=1)
    corrupt: Literal["error", "skip"] = setting("a picture that cannot be read: stop, or leave it out", default="error")
    train_split: str = setting("sub-folder with the training pictures", default="train")
    eval_split: str = setting(
        "sub-folder with the held-out pictures; auto: val, valid, validation or test", default="auto"
    )
    classes: tuple[str, ...] | None = setting(
        "the only classes, by name or number; labels are numbered in this order; null: all", default=None
    )
    samples_per_class: int | None = setting(
        "training samples of each class, chosen by the seed; null: all", default=None, at_least=1
    )
    tokenizer: str | None = setting(
        "a Hugging Face tokenizer.json or SentencePiece .model (pip install 'gpipe-cli[text]'); null: bytes",
        default=None,
    )
    held_out: float = setting("share of the text, at its end, that is held out", default=0.1, above=0, below=1)
    cache: str = setting("folder for tokenised text", default="~/.cache/gpipe/text")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Group `optimizer`."""

    name: str = setting("timm's name of the optimizer; any of them with optimizer=timm optimizer.name=NAME")
    lr: float = setting("learning rate for the whole mini-batch (no scaling by batch_size)", at_least=0)
    weight_decay: float = setting("weight decay, not on biases and norms", at_least=0)
    momentum: float = setting("momentum", default=0.0, at_least=0, below=1)
    options: dict[str, Any] = field(
        default_factory=dict, metadata=about("further arguments, optimizer.options.eps=1e-8")
    )


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    """Group `lr_schedule`: the learning rate over the epochs (`schedule` is the pipeline's)."""

    name: Literal["constant", "cosine", "exponential", "step", "inverse_sqrt"] = setting(
        "which curve; chosen by lr_schedule=NAME"
    )
    warmup_epochs: float = setting("epochs of linear warm-up", default=0.0, at_least=0)
    warmup_steps: int = setting("optimizer steps of linear warm-up", default=0, at_least=0)
    decay_rate: float = setting("factor of each decay", default=1.0, above=0, at_most=1)
    decay_epochs: float = setting("epochs between decays", default=1.0, above=0)
    min_lr: float = setting("the rate never falls below this", default=0.0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`gpipe train`: the four groups and the settings at the top level."""

    command: str = setting("the command that runs")
    model: ModelConfig = field(metadata=about("the network"))
    dataset: DatasetConfig = field(metadata=about("the data"))
    optimizer: OptimizerConfig = field(metadata=about("the optimizer"))
    lr_schedule: LrScheduleConfig = field(metadata=about("the learning rate over the epochs"))
    partitions: int = setting("parts that the model is cut into, one after another (the paper's K)", at_least=1)
    replicas: int = setting("copies of the pipeline, each with a share of the batch", at_least=1)
    micro_batches: int = setting("parts of a mini-batch (the paper's M); 4 x partitions is good", at_least=1)
    batch_size: int = setting("samples in a mini-batch, one optimizer step", at_least=1)
    eval_batch_size: int | None = setting("samples per evaluation batch; null: batch_size", at_least=1)
    image_size: int | None = setting("height and width of the input in pixels; null for text", at_least=1)
    epochs: int = setting("passes over the training data; 0: evaluate only", at_least=0)
    steps: int | None = setting("stop after so many optimizer steps; null: when the epochs end", at_least=1)
    seed: int = setting("seed of the weights, the data order and all randomness", at_least=0, below=2**32)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: GPUs when there are any, else the CPU")
    precision: Literal["fp32", "bf16"] = setting("bf16: automatic mixed precision, weights stay fp32")
    remat: Literal["full", "except_last", "none", "auto"] = setting(
        "re-materialization: recompute activations in the backward pass to save memory; "
        "auto: keep what fits into memory_gb, recompute the rest"
    )
    memory_gb: float | None = setting(
        "memory that each rank may use, in GB, for remat=auto; null: what is free on its GPU, on a CPU the machine's "
        "shared out",
        default=None,
        above=0,
    )
    schedule: Literal["gpipe", "1f1b", "eager_1f1b", "zero_bubble", "interleaved"] = setting(SCHEDULE_HELP)
    taper: bool = setting(TAPER_HELP, default=False)
    balance: tuple[int, ...] | None = setting("layers in each partition, [5,4]; null: by cost", at_least=1)
    cut: Literal["flops", "time"] = setting("cost of a layer for the automatic balance")
    ranks: int | None = setting("processes; null: one per partition on CPU, at most one per GPU on CUDA", at_least=1)
    threads: int | None = setting("CPU threads of each rank; null: the cores shared out", at_least=1)
    channels_last: bool = setting("channels-last memory format, faster for convolutions")
    label_smoothing: float = setting("share of the target spread over all classes", at_least=0, below=1)
    ema_decay: float = setting("moving average of the weights for evaluation; 0: off", at_least=0, below=1)
    clip_grad_norm: float | None = setting("largest norm of all gradients together; null: no clipping", above=0)
    workers: int = setting("processes that load data; 0: none besides the rank itself", at_least=0)
    eval_every: int = setting("epochs between evaluations; 0: only at the end", at_least=0)
    checkpoint_every: int = setting("epochs between checkpoints; 0: only at the end", at_least=0)
    keep_checkpoints: int = setting("newest checkpoints that stay", at_least=1)
    results_dir: str = setting("folder of the tables and of runs/")
    run_dir: str | None = setting("folder of this run; null: a new one below results_dir/runs")
    resume: str | None = setting(
        "go on from a run folder or a checkpoint; auto: the newest run of this kind; null: start anew"
    )
    tensorboard: bool = setting("also write TensorBoard events (pip install 'gpipe-cli[tensorboard]')")
    progress: Literal["auto", "bar", "plain", "none"] = setting("auto: a bar on a terminal, else plain lines")
    log_every: int = setting("steps between lines of metrics.jsonl", at_least=1)


def stem_for(stem: Literal["auto", "imagenet", "small"], image_size: int) -> Literal["imagenet", "small"]:
    """The stem that `model.stem` means for pictures of this size."""
    if stem == "auto":
        return "small" if image_size < SMALL_STEM_BELOW else "imagenet"
    return stem


def config_class(command: str) -> type:
    """The dataclass of a command's settings."""
    if command == "bench":
        from gpipe_cli.config_bench import BenchConfig

        return BenchConfig
    if command == "plan":
        from gpipe_cli.config_plan import PlanConfig

        return PlanConfig
    if command == "eval":
        from gpipe_cli.config_eval import EvalConfig

        return EvalConfig
    if command == "transfer":
        from gpipe_cli.config_transfer import TransferConfig

        return TransferConfig
    return TrainConfig


def from_hydra(command: str, composed: Mapping[str, Any]) -> Any:
    """Typed and checked settings of `command` from the composed configuration (a plain mapping or a DictConfig).

    Raises ConfigError, one line, for a wrong type, a value out of bounds and a combination that cannot work.
    """
    if not isinstance(composed, dict):
        from omegaconf import OmegaConf

        composed = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    config: Any = read(config_class(command), {**composed, "command": command})
    check: Any = getattr(config, "check", None)
    if check is not None:
        check()
    else:
        check_together(config)
    return config
