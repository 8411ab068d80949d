"""`gpipe eval` of a language model: the run's own numbers, and text that it goes on with."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from gpipe_cli.models.transformer.network import transformer
from safetensors.torch import load_file

from gpipe_cli.compose import load
from gpipe_cli.config_eval import run_settings
from gpipe_cli.distributed.launch import RankContext
from gpipe_cli.errors import ConfigError
from gpipe_cli.training import checkpoints
from gpipe_cli.training.loaded import load_network
from gpipe_cli.training.weights import open_weights

SETTINGS = (
    "model=transformer", "model.layers=1", "model.width=8", "model.num_heads=2", "model.ff_width=16",
    "model.seq_len=16", "model.tied=true", "dataset.path=text", "dataset.cache=cache", "batch_size=4",
    "eval_batch_size=5", "micro_batches=2", "epochs=1", "optimizer.lr=0.3", "lr_schedule=constant", "ema_decay=0.5",
    "partitions=2", "threads=1", "device=cpu",
)  # fmt: skip
PROMPT = "Once\x1b upon, café"


@pytest.fixture(scope="module")
def trained(gpipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trained")
    for split, times in (("train", 60), ("val", 12)):
        (folder / "text" / split).mkdir(parents=True)
        (folder / "text" / split / "a.txt").write_text("Once upon a time there was a café. " * times, encoding="utf-8")
    ended = gpipe.train(folder, *SETTINGS)
    assert ended.exit_code == 0, ended.stderr
    return ended


@pytest.mark.parametrize("words", [(), ("partitions=1",)], ids=["as the run", "uncut"])
def test_the_numbers_are_those_of_the_runs_own_evaluation(
    gpipe: Any, trained: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    results = tmp_path / "results"
    words = (f"checkpoint={trained.run_dir}", f"run_dir={results}", "progress=none", *words)
    ended = gpipe.run("eval", trained.folder, "threads=1", *words)
    assert ended.exit_code == 0, ended.stderr
    summary, row = json.loads((results / "summary.json").read_text()), trained.rows[-1]
    assert (summary["loss"], summary["num_samples"]) == (row["eval_loss"], row["num_eval"])
    for key in ("top1", "perplexity", "bits_per_byte"):
        assert summary[key] == row[key]
    assert f"bits/byte   {row['bits_per_byte']:.3f}" in ended.stdout
    assert sorted(path.name for path in results.iterdir()) == ["config.yaml", "summary.json"]


def test_the_training_text_has_no_bits_of_the_held_out_one(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    words = (f"checkpoint={trained.run_dir}", f"run_dir={tmp_path}", "split=train", "partitions=1")
    assert gpipe.run("eval", trained.folder, "threads=1", *words).exit_code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_samples"] == checkpoints.load_facts(trained.checkpoint)["data"]["num_train"] * 16
    assert (summary["bits_per_byte"], summary["trigram_bits_per_byte"]) == (None, None)


def continuation(gpipe: Any, trained: Any, folder: Path, *words: str) -> str:
    """What is printed; typed where the text is not."""
    words = (f"checkpoint={trained.run_dir}", "num_tokens=20", f"prompt={PROMPT}", *words)
    ended = gpipe.run("eval", folder, "threads=1", *words)
    assert ended.exit_code == 0, ended.stderr
    assert "moving average of the weights after 33 steps" in ended.stderr
    assert not list(folder.iterdir())
    text: str = ended.stdout
    return text


def test_a_prompt_is_continued_without_data_and_the_same_at_any_cut(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    one, two, uncut = (
        continuation(gpipe, trained, tmp_path / name, *words)
        for name, words in (("a", ("partitions=2",)), ("b", ("partitions=4", "ranks=2")), ("c", ("partitions=1",)))
    )
    assert one == two == uncut
    assert one.startswith("Once\N{REPLACEMENT CHARACTER} upon, café")
    assert one.endswith("\n")
    assert len(one) > len(f"{PROMPT}\n")
    # A byte model writes anything; the terminal must survive it.
    assert all(character.isprintable() or character in "\t\n\N{REPLACEMENT CHARACTER}" for character in one)


def test_another_seed_writes_another_text_and_temperature_0_does_not_draw(
    gpipe: Any, trained: Any, tmp_path: Path
) -> None:
    texts = [
        continuation(gpipe, trained, tmp_path / str(number), "partitions=1", *words)
        for number, words in enumerate([(), ("seed=1",), ("temperature=0",), ("temperature=0", "seed=1")])
    ]
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]


def test_the_continuation_is_the_plain_networks(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    """Tied matrices included: the file has both, equal."""
    folder = tmp_path / "export"
    exported = gpipe.run("eval", folder, "threads=1", f"checkpoint={trained.run_dir}", "export=model.safetensors")
    assert exported.exit_code == 0, exported.stderr
    layers = transformer(num_layers=1, width=8, num_heads=2, ff_width=16, vocab_size=256, seq_len=16)
    model = torch.nn.Sequential(OrderedDict((name, make()) for name, make in layers)).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    assert torch.equal(model.embedding.tokens.weight, model.softmax.weight)
    tokens = list(PROMPT.encode())
    for _ in range(20):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens[-16:]]))[0, -1].argmax()))
    text = bytes(tokens).decode(errors="replace")
    shown = continuation(gpipe, trained, tmp_path / "x", "temperature=0", "partitions=1")
    assert shown == "".join(c if c.isprintable() or c in "\t\n" else "\N{REPLACEMENT CHARACTER}" for c in text) + "\n"


def test_a_tokenizer_that_is_missing_is_one_line(gpipe: Any, trained: Any, tmp_path: Path) -> None:
    words = (f"checkpoint={trained.run_dir}", "dataset.tokenizer=some.model", "prompt=Once")
    ended = gpipe.run("eval", tmp_path / "x", "threads=1", *words)
    assert (ended.exit_code, ended.error) == (2, "dataset.tokenizer=some.model: no such file")


def test_a_tokenizer_of_another_size_is_one_line(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.folder)
    stored = open_weights(trained.run_dir)
    facts = {**stored.facts, "data": {**stored.facts["data"], "vocab_size": 300}}
    config = run_settings(stored.config, load("eval", ["partitions=1"]), "auto")
    context = RankContext(rank=0, world_size=1, local_rank=0, device="cpu", num_threads=1)
    with pytest.raises(ConfigError, match=r"^dataset.tokenizer=null: has 256 tokens, the network was trained with 300"):
        load_network(dataclasses.replace(stored, facts=facts), config, context, split="eval", average=False)
