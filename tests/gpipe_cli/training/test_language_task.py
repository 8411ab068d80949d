"""Text as a task: shapes, every token once, one loss for any cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.errors import ConfigError, TrainingError
from gpipe_cli.training.evaluation import evaluate
from gpipe_cli.training.language_metrics import LanguageResult
from gpipe_cli.training.session import Session

MakeSession = Callable[..., Session]
TINY_TEXT = (
    "model=transformer", "model.layers=2", "model.width=8", "model.num_heads=2", "model.ff_width=8", "model.seq_len=16",
    "batch_size=8", "epochs=1", "threads=1", "device=cpu", "log_every=1",
)  # fmt: skip


def text_file(folder: Path, num_bytes: int = 4000) -> str:
    file = folder / "text.txt"
    file.write_text("".join(chr(97 + index * index % 23) for index in range(num_bytes)))
    return f"dataset.path={file}"


@pytest.fixture
def make_text(make_session: MakeSession, tmp_path: Path) -> MakeSession:
    def make(*words: str) -> Session:
        return make_session(text_file(tmp_path), f"dataset.cache={tmp_path / 'cache'}", *words, base=TINY_TEXT)

    return make


def test_blocks_are_predicted_token_by_token(make_text: MakeSession) -> None:
    session = make_text()
    inputs, targets = next(iter(session.task.train_batches(0, 0)))
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    sample, empty = session.task.sample(3, meta=False), session.task.sample(3, meta=True)
    assert (sample.dtype, sample.shape, empty.device.type, empty.shape) == (
        torch.int64, (3, 16), "meta", (3, 16),
    )  # fmt: skip


@pytest.mark.parametrize("eval_batch_size", [1, 4, 100])
def test_every_held_out_token_counts_once(make_text: MakeSession, eval_batch_size: int) -> None:
    session = make_text(f"eval_batch_size={eval_batch_size}")
    result = evaluate(session)
    assert isinstance(result, LanguageResult)
    assert result.num_tokens == session.info.num_eval * 16 == 400  # of 401 bytes, a newline after the file included
    inputs, targets = (torch.cat(parts) for parts in zip(*session.task.eval_batches(), strict=True))
    logits = session.pipe.evaluate(inputs)
    assert isinstance(logits, torch.Tensor)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item()
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(loss / math.log(2), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_tied_softmax_is_the_embeddings_matrix_on_any_cut(make_text: MakeSession) -> None:
    free, tied = make_text(), make_text("model.tied=true", "partitions=2", "ranks=1")
    assert free.pipe.num_parameters - tied.pipe.num_parameters == 256 * 8
    before = {name: tensor.clone() for name, tensor in tied.pipe.state_dict().items()}
    assert torch.equal(before["embedding.tokens.weight"], before["softmax.weight"])
    inputs, targets = next(iter(tied.task.train_batches(0, 0)))
    tied.pipe.forward_backward(inputs, targets)
    tied.optimizer.step()
    after = tied.pipe.state_dict()
    assert torch.equal(after["embedding.tokens.weight"], after["softmax.weight"])
    assert not torch.equal(after["softmax.weight"], before["softmax.weight"])


def test_the_summary_sets_the_model_beside_a_trigram_model(make_text: MakeSession) -> None:
    session = make_text()
    facts = session.task.summary_facts(evaluate(session))
    assert 0 < facts["trigram_bits_per_byte"] < facts["bits_per_byte"]
    assert (facts["seq_len"], len(facts["text_digest"])) == (16, 16)


def test_more_tokens_than_the_embedding_has_are_refused(make_text: MakeSession) -> None:
    with pytest.raises(ConfigError) as error:
        make_text("model.vocab_size=255")
    assert str(error.value) == (
        "model.vocab_size=255: the tokenizer has 256 tokens, and each needs a row; use at least that"
    )


def test_a_users_network_is_offered_the_vocabulary_and_checked(
    make_session: MakeSession, gpipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = """
        from torch import nn

        def layers(num_classes, seq_len, extra=0):
            assert seq_len == 16
            return [("embedding", nn.Embedding(256, 4)), ("logits", nn.Linear(4, num_classes + extra))]
    """
    words = ("model=module", "dataset=text", "model.seq_len=16", *TINY_TEXT[6:], gpipe.network(tmp_path, source))
    data = (text_file(tmp_path), f"dataset.cache={tmp_path / 'cache'}")
    session = make_session(*words, *data, base=())
    batch = next(iter(session.task.train_batches(0, 0)))
    assert session.pipe.forward_backward(*batch).loss.item() == pytest.approx(math.log(256), rel=0.2)
    wrong = make_session(*words, *data, "model.kwargs.extra=1", base=())
    with pytest.raises(TrainingError, match=r"returns \(2, 16, 257\); expected logits \(2, 16, 256\)"):
        wrong.pipe.forward_backward(*batch)
