"""Text for a language model: a stream of tokens, cut into blocks of `seq_len` predicted tokens each.

Without a path it is the embedded text (python_topics.py), which needs no cache. Files are read in the order of their
names as one stream, tokenised once into a cache, and split: a folder that holds train/ and one of val/, valid/,
validation/ and test/ is split as it stands; of anything else the last part (`held_out`, a tenth of the bytes by
default) is held out. The split is made in bytes before tokenising, so every tokenizer, and the byte-trigram model, is
judged on the same text.

Block i predicts tokens i * seq_len + 1 to (i + 1) * seq_len from seq_len tokens that begin one earlier. Neighbouring
blocks share one token, so every token but the first is predicted once; what does not fill a block at the end is unused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from gpipe_cli.data.python_topics import python_topics
from gpipe_cli.data.text_cache import TextFacts, open_tokens, read_facts, write_entry
from gpipe_cli.data.text_files import find_text_files, read_pieces
from gpipe_cli.data.text_info import TextInfo
from gpipe_cli.data.tokenization import Tokenizer, load_tokenizer
from gpipe_cli.errors import ConfigError, DataError

Split = Literal["train", "eval"]

HELD_OUT = 0.1
EVAL_FOLDERS = ("val", "valid", "validation", "test")
DEFAULT_CACHE = "~/.cache/gpipe/text"


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Which text, cut and tokenised how.

    path: a file, a folder, a pattern such as 'books/*.txt', or None for the embedded text. tokenizer: path of its file,
    None for bytes. held_out: share of the bytes that is held out where no folders say it. cache: folder for tokens.
    """

    path: str | None = None
    tokenizer: str | None = None
    held_out: float = HELD_OUT
    cache: str = DEFAULT_CACHE


class TextBlocks(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Items (inputs (seq_len,), targets (seq_len,)), int64: targets are the inputs one token later."""

    def __init__(self, tokens: npt.NDArray[Any], seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return num_blocks(len(self.tokens), self.seq_len)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.seq_len
        block = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return block[:-1], block[1:]


def prepare_text(source: TextSource, seq_len: int) -> TextInfo:
    """Make the text ready and count its blocks: one rank calls this, before training.

    Raises ConfigError, one line, for files that are missing, empty, not UTF-8 (with the offset) or too short for a
    block of each split, for a tokenizer that cannot be used, and for a cache that cannot be written.
    """
    tokenizer = load_tokenizer(source.tokenizer)
    if source.path is None and source.tokenizer is None:
        train, held_out = python_topics()
        facts = TextFacts(len(train), len(held_out), len(held_out), tokenizer.vocab_size)
        digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()
    else:
        digest = _digest(source)
        entry = _entry(source, tokenizer, digest)
        facts = read_facts(entry) or write_entry(entry, _pieces(source), tokenizer)
    _check_length(source, facts, seq_len)
    return TextInfo(
        name="text",
        num_train=num_blocks(facts.num_train_tokens, seq_len),
        num_eval=num_blocks(facts.num_eval_tokens, seq_len),
        classes=(),
        seq_len=seq_len,
        vocab_size=tokenizer.vocab_size,
        eval_bytes_per_token=facts.num_eval_bytes / facts.num_eval_tokens,
        text_digest=digest[:16],
    )


def open_text(source: TextSource, split: Split, seq_len: int) -> TextBlocks:
    """One split of prepared text; files are memory-mapped. Raises DataError when it was not, or has changed since."""
    return TextBlocks(read_tokens(source, split), seq_len)


def read_tokens(source: TextSource, split: Split) -> npt.NDArray[Any]:
    """All token ids of a split of prepared text, 1-d; of files, a read-only memory map. Raises as open_text."""
    if source.path is None and source.tokenizer is None:
        return np.frombuffer(python_topics()[0 if split == "train" else 1], dtype=np.uint8)
    try:
        return open_tokens(_entry(source, load_tokenizer(source.tokenizer), _digest(source)), split)
    except FileNotFoundError:
        problem = "is not the text that was prepared; do not change the data during a run"
        raise DataError(source.path or "the embedded text", problem) from None


def num_blocks(num_tokens: int, seq_len: int) -> int:
    """Blocks of `seq_len` predicted tokens: the first token of a text is predicted by none."""
    return max(0, num_tokens - 1) // seq_len


def _pieces(source: TextSource) -> Iterator[tuple[str, bytes]]:
    """The text in order, each piece with the split that it belongs to."""
    if source.path is None:
        yield from zip(("train", "eval"), python_topics(), strict=True)
        return
    folders = _split_folders(source.path)
    if folders is not None:
        for split, folder in folders.items():
            yield from ((split, piece) for piece in read_pieces(find_text_files(str(folder))))
        return
    files = find_text_files(source.path)
    num_train = int(sum(file.stat().st_size for file in files) * (1 - source.held_out))
    done, split = 0, "train"
    for piece in read_pieces(files):
        if split == "train" and done + len(piece) > num_train:
            cut = _character_start(piece, num_train - done)
            split = "eval"
            yield from ((name, part) for name, part in (("train", piece[:cut]), ("eval", piece[cut:])) if part)
        else:
            yield split, piece
        done += len(piece)


def _character_start(piece: bytes, place: int) -> int:
    """The first place from `place` on where a character begins."""
    while place < len(piece) and piece[place] & 0xC0 == 0x80:
        place += 1
    return place


def _split_folders(path: str) -> dict[str, Path] | None:
    root = Path(path).expanduser()
    held_out = [root / name for name in EVAL_FOLDERS if (root / name).is_dir()]
    if not (root / "train").is_dir() or not held_out:
        return None
    if len(held_out) > 1:
        names = " and ".join(f"{folder.name}/" for folder in held_out)
        raise ConfigError("dataset.path", path, f"holds {names}; which one is held out? keep one of them there")
    return {"train": root / "train", "eval": held_out[0]}


def _digest(source: TextSource) -> str:
    """Of every byte of the text and of the way it is split; reads the files, and so finds what is wrong with them."""
    digest = hashlib.sha256()
    for split, piece in _pieces(source):
        # Splits differ by the byte before, which is not UTF-8, so no text can imitate it.
        digest.update((b"\xfe" if split == "train" else b"\xff") + piece)
    return digest.hexdigest()


def _entry(source: TextSource, tokenizer: Tokenizer, digest: str) -> Path:
    key = hashlib.sha256(f"{digest} {tokenizer.identity}".encode()).hexdigest()[:32]
    return Path(source.cache).expanduser() / key


def _check_length(source: TextSource, facts: TextFacts, seq_len: int) -> None:
    for split, what in (("train", "training"), ("eval", "held-out")):
        num_tokens = facts.num_tokens(split)
        if num_blocks(num_tokens, seq_len) < 1:
            problem = f"{num_tokens} {what} tokens are fewer than one block of {seq_len + 1}"
            raise ConfigError("dataset.path", source.path, f"{problem}; use more text or a smaller seq_len")
