from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpipe_cli.data.text_cache import TextFacts, open_tokens, read_facts, write_entry
from gpipe_cli.data.tokenization import ByteTokenizer, TokenIds
from gpipe_cli.errors import ConfigError

PIECES = [("train", b"abc"), ("train", b"de"), ("eval", b"xyz")]


class Words:
    """A tokenizer of many tokens: pairs of bytes."""

    vocab_size = 65536
    identity = "pairs"

    def encode(self, text: bytes) -> TokenIds:
        return np.frombuffer(text + b" " * (len(text) % 2), dtype=np.uint16)

    def decode(self, token_ids: object) -> str:
        raise NotImplementedError


def test_tokens_come_back_through_a_read_only_map(tmp_path: Path) -> None:
    facts = write_entry(tmp_path / "entry", iter(PIECES), ByteTokenizer())
    assert facts == TextFacts(num_train_tokens=5, num_eval_tokens=3, num_eval_bytes=3, vocab_size=256)
    assert read_facts(tmp_path / "entry") == facts
    tokens = open_tokens(tmp_path / "entry", "train")
    assert bytes(tokens) == b"abcde"
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable


def test_wide_tokens_are_counted_beside_the_bytes_they_stand_for(tmp_path: Path) -> None:
    facts = write_entry(tmp_path / "entry", [("train", b"abcdef"), ("eval", b"abcde")], Words())
    assert (facts.num_train_tokens, facts.num_eval_tokens, facts.num_eval_bytes) == (3, 3, 5)
    assert open_tokens(tmp_path / "entry", "eval").tolist() == Words().encode(b"abcde").tolist()


def test_a_split_without_tokens_can_be_opened(tmp_path: Path) -> None:
    write_entry(tmp_path / "entry", [("train", b"abc")], ByteTokenizer())
    assert len(open_tokens(tmp_path / "entry", "eval")) == 0


def test_an_interrupted_writer_leaves_no_entry(tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, bytes]]:
        yield "train", b"abc"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_entry(tmp_path / "entry", interrupted(), ByteTokenizer())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "missing", "facts"])
def test_a_damaged_entry_is_not_read_and_is_replaced(tmp_path: Path, damage: str) -> None:
    entry = tmp_path / "entry"
    facts = write_entry(entry, PIECES, ByteTokenizer())
    if damage == "truncated":
        (entry / "train.bin").write_bytes(b"abcd")
    elif damage == "missing":
        (entry / "eval.bin").unlink()
    else:
        (entry / "facts.json").write_text('{"num_train')
    assert read_facts(entry) is None
    with pytest.raises(FileNotFoundError):
        open_tokens(entry, "train")
    assert write_entry(entry, PIECES, ByteTokenizer()) == facts
    assert bytes(open_tokens(entry, "train")) == b"abcde"


def test_the_slower_of_two_writers_leaves_the_others_entry_alone(tmp_path: Path) -> None:
    entry = tmp_path / "entry"

    def while_another_writes() -> Iterator[tuple[str, bytes]]:
        yield from PIECES
        write_entry(entry, PIECES, ByteTokenizer())
        inodes.append((entry / "train.bin").stat().st_ino)

    inodes: list[int] = []
    write_entry(entry, while_another_writes(), ByteTokenizer())
    assert (entry / "train.bin").stat().st_ino == inodes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ConfigError, match=r"^dataset.cache=.*: cannot write the tokenised text there: .*dataset.cache=FOLDER"
    ):
        write_entry(tmp_path / "file" / "entry", PIECES, ByteTokenizer())
