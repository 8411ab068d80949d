"""Tokenised text on disk: written once, whole or not at all, and read through a memory map ever after.

An entry is a folder named by what it was made from (the bytes of the text, the tokenizer, the split), so it never goes
out of date. It is written under a temporary name and then renamed; of two runs that make the same one, one wins.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpipe_cli.data.tokenization import Tokenizer, token_dtype
from gpipe_cli.errors import ConfigError

SPLITS = ("train", "eval")
_FACTS = "facts.json"


@dataclass(frozen=True)
class TextFacts:
    """Numbers of an entry: tokens of each split, and bytes of text that the held-out ones stand for."""

    num_train_tokens: int
    num_eval_tokens: int
    num_eval_bytes: int
    vocab_size: int

    def num_tokens(self, split: str) -> int:
        return self.num_train_tokens if split == "train" else self.num_eval_tokens


def read_facts(entry: Path) -> TextFacts | None:
    """Facts of a whole entry; None where there is none, or where its files are not those that were written."""
    try:
        facts = TextFacts(**json.loads((entry / _FACTS).read_text(encoding="utf-8")))
        sizes = [(entry / f"{split}.bin").stat().st_size for split in SPLITS]
    except (OSError, ValueError, TypeError):
        return None
    width = np.dtype(token_dtype(facts.vocab_size)).itemsize
    return facts if sizes == [facts.num_tokens(split) * width for split in SPLITS] else None


def write_entry(entry: Path, pieces: Iterable[tuple[str, bytes]], tokenizer: Tokenizer) -> TextFacts:
    """Tokenise pieces of text, each with its split, into the entry. Pieces are encoded one by one.

    Raises ConfigError when the folder cannot be written.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    except OSError as error:
        raise _unwritable(entry, error) from None
    try:
        facts = _write(aside, pieces, tokenizer)
        _put_in_place(aside, entry)
    except OSError as error:
        raise _unwritable(entry, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return facts


def open_tokens(entry: Path, split: str) -> npt.NDArray[Any]:
    """Token ids of a split, a read-only memory map. Raises OSError when the entry is not there."""
    facts = read_facts(entry)
    if facts is None:
        raise FileNotFoundError(entry)
    num_tokens, dtype = facts.num_tokens(split), token_dtype(facts.vocab_size)
    if num_tokens == 0:  # a file of no bytes cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(entry / f"{split}.bin", dtype=dtype, mode="r", shape=(num_tokens,))


def _write(folder: Path, pieces: Iterable[tuple[str, bytes]], tokenizer: Tokenizer) -> TextFacts:
    num_tokens, num_eval_bytes = dict.fromkeys(SPLITS, 0), 0
    with ExitStack() as stack:
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS}
        for split, piece in pieces:
            token_ids = tokenizer.encode(piece)
            files[split].write(token_ids.tobytes())
            num_tokens[split] += len(token_ids)
            num_eval_bytes += len(piece) if split == "eval" else 0
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    facts = TextFacts(num_tokens["train"], num_tokens["eval"], num_eval_bytes, tokenizer.vocab_size)
    (folder / _FACTS).write_text(json.dumps(asdict(facts)) + "\n", encoding="utf-8")
    return facts


def _put_in_place(aside: Path, entry: Path) -> None:
    try:
        os.rename(aside, entry)
    except OSError:
        if read_facts(entry) is not None:
            return  # another run was faster, with the same content
        shutil.rmtree(entry)  # a damaged one
        os.rename(aside, entry)


def _unwritable(entry: Path, error: OSError) -> ConfigError:
    problem = f"cannot write the tokenised text there: {error.strerror or error}; use dataset.cache=FOLDER"
    return ConfigError("dataset.cache", entry.parent, problem)
