"""Training on text: blocks of tokens, each predicted from those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpipe_cli.data.loaders import BatchLoader
from gpipe_cli.data.text import TextBlocks, TextSource, open_text, prepare_text
from gpipe_cli.data.text_baseline import trigram_bits_per_byte
from gpipe_cli.data.text_info import TextInfo
from gpipe_cli.data.text_loaders import text_eval_loader, text_train_loader
from gpipe_cli.data.tokenization import check_vocabulary, load_tokenizer
from gpipe_cli.errors import TrainingError
from gpipe_cli.training.language_loss import build_language_loss
from gpipe_cli.training.language_metrics import LanguageResult, TokenCounts, language_result
from gpipe_cli.training.losses import LossFn
from gpipe_cli.training.made_up import made_up_inputs
from gpipe_cli.training.networks import build_network, tied_parameters
from gpipe_cli.training.task import Split

if TYPE_CHECKING:
    from gpipe_cli.config import DatasetConfig, TrainConfig
    from gpipe_cli.pipeline import Layers


def text_source(config: DatasetConfig) -> TextSource:
    """The text that a configuration names."""
    return TextSource(path=config.path, tokenizer=config.tokenizer, held_out=config.held_out, cache=config.cache)


def prepare_language(config: TrainConfig) -> TextInfo:
    """Make the text ready; one rank calls this. Raises ConfigError as prepare_text, and for too many tokens."""
    assert config.model.seq_len is not None
    if config.model.name == "transformer":  # known before the text is tokenised
        check_vocabulary(config.model.vocab_size, load_tokenizer(config.dataset.tokenizer).vocab_size)
    return prepare_text(text_source(config.dataset), config.model.seq_len)


class LanguageTask:
    """Token ids (N, T) int64 in, logits (N, T, vocabulary) out; see task.Task."""

    unit = "tokens"

    def __init__(self, config: TrainConfig, info: TextInfo) -> None:
        self.config, self.info = config, info
        self.units_per_sample = info.seq_len
        self._source = text_source(config.dataset)
        self._splits: dict[str, TextBlocks] = {}

    def layers(self) -> Layers:
        return build_network(self.config.model, self.info.vocab_size, None, self.config.seed)

    def ties(self) -> tuple[tuple[str, ...], ...]:
        return tied_parameters(self.config.model)

    def sample(self, num_samples: int, *, meta: bool) -> Tensor:
        generator = None if meta else torch.Generator().manual_seed(0)
        return made_up_inputs(
            num_samples, seq_len=self.info.seq_len, num_tokens=self.info.vocab_size, generator=generator
        )

    def loss_fn(self) -> LossFn:
        """The training loss; for a user's network also a check of what the last layer returns."""
        model, vocab_size = self.config.model, self.info.vocab_size
        loss_fn = build_language_loss(self.config.label_smoothing)
        if model.name != "module":
            return loss_fn

        def checked(outputs: Any, targets: Tensor) -> Tensor:
            shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            if shape != (*targets.shape, vocab_size):
                raise TrainingError(
                    f"model.factory={model.factory}: the last layer returns {shape}; expected logits "
                    f"{(*targets.shape, vocab_size)}, samples x tokens x vocabulary"
                )
            return loss_fn(outputs, targets)

        return checked

    def train_batches(self, epoch: int, start_batch: int) -> BatchLoader:
        return text_train_loader(
            self._open("train"),
            batch_size=self.config.batch_size,
            workers=self.config.workers,
            seed=self.config.seed,
            epoch=epoch,
            start_batch=start_batch,
        )

    def eval_batches(self, split: Split = "eval") -> BatchLoader:
        batch_size = self.config.eval_batch_size or self.config.batch_size
        return text_eval_loader(self._open(split), batch_size=batch_size, workers=self.config.workers)

    def report_to(self, message: Callable[[str], None]) -> None:
        """Nothing to say: text that cannot be read is refused when it is prepared."""

    def counter(self) -> TokenCounts:
        return TokenCounts()

    def result(self, counts: Sequence[float]) -> LanguageResult:
        return language_result(counts, self.info.eval_bytes_per_token)

    def rates(self, samples_per_s: float) -> Mapping[str, float]:
        return {"tokens_per_s": samples_per_s * self.info.seq_len}

    def summary_facts(self, result: LanguageResult | None) -> Mapping[str, Any]:
        return {
            "top1": result.top1 if result is not None else None,
            "perplexity": result.perplexity if result is not None else None,
            "bits_per_byte": result.bits_per_byte if result is not None else None,
            "trigram_bits_per_byte": trigram_bits_per_byte(self._source, self.info.seq_len),
            "seq_len": self.info.seq_len,
            "text_digest": self.info.text_digest,
        }

    def _open(self, split: Split) -> TextBlocks:
        if split not in self._splits:
            self._splits[split] = open_text(self._source, split, self.info.seq_len)
        return self._splits[split]
