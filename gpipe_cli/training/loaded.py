"""A trained network from a checkpoint, ready to be evaluated: no optimizer, nothing to train, any cut and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpipe_cli.data.known_classes import open_known
from gpipe_cli.data.text_info import TextInfo
from gpipe_cli.distributed.mesh import make_mesh
from gpipe_cli.errors import CheckpointError, ConfigError, TrainingError
from gpipe_cli.pipeline import Layers, Pipeline, ProcessGroups
from gpipe_cli.training.communication import from_first, from_last
from gpipe_cli.training.confusion import Confusion
from gpipe_cli.training.evaluation import count
from gpipe_cli.training.generation import continue_tokens
from gpipe_cli.training.session import as_config_error
from gpipe_cli.training.task import Counter, Result, Split, Task
from gpipe_cli.training.weights import StoredWeights

if TYPE_CHECKING:
    from gpipe_cli.config import TrainConfig
    from gpipe_cli.data.info import DataInfo
    from gpipe_cli.data.tokenization import Tokenizer
    from gpipe_cli.distributed.launch import RankContext


@dataclass(frozen=True, kw_only=True)
class LoadedNetwork:
    """One rank's part of a trained network, and the samples that it is to be evaluated on."""

    config: TrainConfig
    context: RankContext
    groups: ProcessGroups | None
    task: Task
    pipe: Pipeline


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What came of a split, the same on every rank. `confusion`: counts by true and predicted class, of pictures."""

    result: Result
    confusion: list[list[int]] | None


def load_network(
    stored: StoredWeights, config: TrainConfig, context: RankContext, *, split: Split | None, average: bool
) -> LoadedNetwork:
    """Prepare the samples of `split` (None: there are none), build this rank's layers and give them the stored weights.

    `config`: the settings of the run that trained the network, changed where the user asked. Collective.

    Raises ConfigError for data that are missing or have other classes, and where the network cannot be cut so;
    CheckpointError where the network is no longer the one that was trained.
    """
    groups = make_mesh(context.world_size, 1).process_groups()
    task = _task(stored, config, groups, split)
    layers = task.layers()
    try:
        pipe = Pipeline(
            layers,
            config.partitions,
            config.micro_batches,
            loss_fn=task.loss_fn(),
            balance=config.balance,
            costs=_costs(config, task, layers),
            seed=config.seed,
            device=context.device,
            autocast=torch.bfloat16 if config.precision == "bf16" else None,
            ties=task.ties(),
            groups=groups,
        )
    except ValueError as error:
        raise as_config_error(config, error) from error
    if config.channels_last:
        pipe.module.to(memory_format=torch.channels_last)
    _load(pipe, stored, average=average)
    return LoadedNetwork(config=config, context=context, groups=groups, task=task, pipe=pipe)


def evaluate_split(network: LoadedNetwork, split: Split, watch: Callable[[int], None] | None = None) -> Evaluation:
    """Every sample of a split once. `watch`: told on the first rank how many batches are done. Collective."""
    task, groups = network.task, network.groups
    if network.config.dataset.name == "text":
        counts = count(network, task.counter(), split, watch)
        return Evaluation(result=task.result(from_last(groups, counts.tolist())), confusion=None)
    confusion = Confusion(task.info.num_classes)
    counts = count(network, _Both(task.counter(), confusion), split, watch)
    return Evaluation(
        result=task.result(from_last(groups, counts.tolist())),
        confusion=from_last(groups, confusion.counts().tolist()),
    )


def write_on(
    network: LoadedNetwork, tokenizer: Tokenizer, prompt: str, *, num_tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """The text that follows `prompt`, piece by piece; every rank must take all pieces. Collective.

    Raises ConfigError for a prompt without tokens, TrainingError when the network's outputs are not numbers.
    """
    try:
        tokens = [int(token) for token in tokenizer.encode(prompt.encode("utf-8"))]
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        tokens = []
    if not tokens:
        raise ConfigError("prompt", prompt, "holds no text that can be read; give at least one character")
    pipe = network.pipe

    def evaluate(token_ids: Tensor) -> Tensor:
        logits: Any = pipe.evaluate(token_ids)
        # The last token's are enough, and of them those that the tokenizer has a text for.
        last = logits[:, -1:, : tokenizer.vocab_size].float().cpu() if pipe.is_last else None
        shared: Tensor = from_last(network.groups, last)
        return shared

    seq_len = network.config.model.seq_len or len(tokens)
    new: list[int] = []
    shown = ""
    try:
        for token in continue_tokens(evaluate, tokens, num_tokens, seq_len=seq_len, temperature=temperature, seed=seed):
            new.append(token)
            text = tokenizer.decode([*tokens, *new]).removeprefix(tokenizer.decode(tokens))
            # A character of several bytes is not yet whole: it waits for the rest.
            whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
            if len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole
    except ValueError as error:
        raise TrainingError(str(error)) from error
    if len(text) > len(shown):
        yield text[len(shown) :]


class _Both:
    """Counts accuracy and confusion at once; `counts()` are the accuracy's."""

    def __init__(self, accuracy: Counter, confusion: Confusion) -> None:
        self._accuracy, self._confusion = accuracy, confusion

    def update(self, outputs: Any, targets: Tensor) -> None:
        self._accuracy.update(outputs, targets)
        self._confusion.update(outputs, targets)

    def counts(self) -> Tensor:
        return self._accuracy.counts()


def _task(stored: StoredWeights, config: TrainConfig, groups: ProcessGroups | None, split: Split | None) -> Task:
    if config.dataset.name == "text":
        return _language_task(stored, config, groups, split)
    from gpipe_cli.training.picture_task import PictureTask

    if split is None:
        raise ValueError("a network for pictures is evaluated on a split")
    opened = []

    def prepare() -> DataInfo:
        info, samples = open_known(config.dataset, split, stored.classes, config.seed)
        opened.append(samples)
        return info

    task = PictureTask(config, from_first(groups, prepare))
    if opened:  # on the first rank, which loads the pictures
        task.splits[split] = opened[0]
    return task


def _language_task(
    stored: StoredWeights, config: TrainConfig, groups: ProcessGroups | None, split: Split | None
) -> Task:
    from gpipe_cli.training.language_task import LanguageTask, prepare_language

    trained_on = stored.facts["data"]
    if split is None:
        info = TextInfo(**{**trained_on, "classes": tuple(trained_on["classes"])})
    else:
        info = from_first(groups, lambda: prepare_language(config))
    if info.vocab_size != trained_on["vocab_size"]:
        problem = f"has {info.vocab_size} tokens, the network was trained with {trained_on['vocab_size']}; use the same"
        raise ConfigError("dataset.tokenizer", config.dataset.tokenizer, problem)
    return LanguageTask(config, info)


def _costs(config: TrainConfig, task: Task, layers: Layers) -> list[float] | None:
    """Costs of the layers for an automatic cut; None where there is none, or they cannot be counted."""
    if config.balance is not None or config.partitions == 1:
        return None
    from gpipe_cli.pipeline.profile import count_costs

    samples = max(2, config.batch_size // config.micro_batches)  # batch norm is counted in training mode
    try:
        return [cost.work for cost in count_costs(layers, task.sample(samples, meta=True))]
    except (RuntimeError, NotImplementedError, ValueError):
        return None  # the cut changes the speed only


def _load(pipe: Pipeline, stored: StoredWeights, *, average: bool) -> None:
    trained = stored.facts.get("layers")
    if trained is not None and list(trained) != list(pipe.layer_names):
        problem = f"has {len(trained)} layers ({_some(trained)}), the network now has {len(pipe.layer_names)} "
        raise CheckpointError(stored.path, f"{problem}({_some(pipe.layer_names)}): it has been changed since")
    own = pipe.state_dict()
    foreign = [name for name in stored.shapes if name.partition(".")[0] in pipe.module._modules and name not in own]
    if foreign:
        raise CheckpointError(stored.path, f"has {foreign[0]}, which the network lacks: it has been changed since")
    tensors = stored.read(own, average=average)
    for name, tensor in own.items():
        if tensors[name].shape != tensor.shape:
            there, here = tuple(tensors[name].shape), tuple(tensor.shape)
            problem = f"{name} has shape {there}, the network's has {here}: it has been changed since"
            raise CheckpointError(stored.path, problem)
    pipe.load_state_dict(tensors)


def _some(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
