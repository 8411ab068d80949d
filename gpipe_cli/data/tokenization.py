"""Text to token ids and back: bytes by default, or a tokenizer that the user has trained with a well-known library."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpipe_cli.errors import ConfigError

TokenIds = npt.NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """`vocab_size` ids from 0 on; `identity` differs between tokenizers that could give different ids."""

    vocab_size: int
    identity: str

    def encode(self, text: bytes) -> TokenIds:
        """Ids of a piece of valid UTF-8, a 1-d array of the smallest unsigned type that holds the vocabulary."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; what is not whole UTF-8 becomes the replacement character."""


class ByteTokenizer:
    """Every byte is a token: 256 of them, nothing to train, and every text can be written."""

    vocab_size = 256
    identity = "bytes"

    def encode(self, text: bytes) -> TokenIds:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of Hugging Face's tokenizers library. Special tokens are neither added nor left out."""

    def __init__(self, path: Path) -> None:
        library = _library("tokenizers", path)
        try:
            self._tokenizer: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception, with serde's words
            raise ConfigError("dataset.tokenizer", path, f"not a tokenizer.json of Hugging Face: {error}") from None
        self.vocab_size = _one_more_than_largest(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.identity = _identity("tokenizers", path)

    def encode(self, text: bytes) -> TokenIds:
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        return np.array(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


class SentencePieceTokenizer:
    """A `.model` file of Google's SentencePiece. (With its usual normalisation ends of lines become spaces.)"""

    def __init__(self, path: Path) -> None:
        library = _library("sentencepiece", path)
        try:
            self._processor: Any = library.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ConfigError("dataset.tokenizer", path, f"not a model of SentencePiece: {error}") from None
        self.vocab_size = int(self._processor.vocab_size())
        self.identity = _identity("sentencepiece", path)

    def encode(self, text: bytes) -> TokenIds:
        return np.array(self._processor.encode(text.decode("utf-8")), dtype=token_dtype(self.vocab_size))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._processor.decode(list(token_ids)))


def load_tokenizer(path: str | None) -> Tokenizer:
    """Bytes for None, Hugging Face's for a `.json` file, SentencePiece's for a `.model` file.

    Raises ConfigError for a file that is missing or not of its kind, and where the library is not installed.
    """
    if path is None:
        return ByteTokenizer()
    file = Path(path).expanduser()
    kinds: dict[str, Callable[[Path], Tokenizer]] = {".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}
    if file.suffix not in kinds:
        problem = "expected null (bytes), a tokenizer.json (Hugging Face) or a .model file (SentencePiece)"
        raise ConfigError("dataset.tokenizer", path, problem)
    if not file.is_file():
        raise ConfigError("dataset.tokenizer", path, "no such file")
    return kinds[file.suffix](file)


def check_vocabulary(vocab_size: int, tokenizer_size: int) -> None:
    """Raises ConfigError when the network's embedding has fewer rows than there are tokens."""
    if tokenizer_size > vocab_size:
        problem = f"the tokenizer has {tokenizer_size} tokens, and each needs a row; use at least that"
        raise ConfigError("model.vocab_size", vocab_size, problem)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned integer type that holds ids below `vocab_size`."""
    return np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        problem = f"needs the {name} library, which is not installed: pip install 'gpipe-cli[text]'"
        raise ConfigError("dataset.tokenizer", path, problem) from None


def _one_more_than_largest(ids: Any) -> int:
    # Ids may have gaps: an embedding needs a row up to the largest.
    return max(ids, default=-1) + 1


def _identity(kind: str, path: Path) -> str:
    return f"{kind}:{hashlib.sha256(path.read_bytes()).hexdigest()}"
