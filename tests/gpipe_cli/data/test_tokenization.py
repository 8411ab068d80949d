from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from gpipe_cli.data.tokenization import ByteTokenizer, check_vocabulary, load_tokenizer, token_dtype
from gpipe_cli.errors import ConfigError

TEXT = "Grün is green.\nThe second line, the second.\n" * 30


@pytest.fixture
def hugging_face_file(tmp_path: Path) -> Path:
    if importlib.util.find_spec("tokenizers") is None:
        pytest.skip("the tokenizers library is an optional extra and not installed")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def sentencepiece_file(tmp_path: Path) -> Path:
    if importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("the sentencepiece library is an optional extra and not installed")
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_prefix=str(tmp_path / "spm"), vocab_size=22, minloglevel=2
    )
    return tmp_path / "spm.model"


def test_bytes_are_tokens_and_come_back() -> None:
    tokenizer = ByteTokenizer()
    token_ids = tokenizer.encode("Grün".encode())
    assert token_ids.tolist() == [71, 114, 195, 188, 110]
    assert tokenizer.decode(token_ids.tolist()) == "Grün"
    assert tokenizer.decode([71, 195]) == "G\ufffd"


def test_a_hugging_face_tokenizer_gives_fewer_tokens_that_come_back(hugging_face_file: Path) -> None:
    tokenizer = load_tokenizer(str(hugging_face_file))
    token_ids = tokenizer.encode(TEXT.encode())
    assert token_ids.dtype == np.uint16
    assert len(token_ids) < len(TEXT) / 2
    assert token_ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(token_ids.tolist()) == TEXT


def test_a_sentencepiece_model_gives_tokens_that_come_back(sentencepiece_file: Path) -> None:
    tokenizer = load_tokenizer(str(sentencepiece_file))
    token_ids = tokenizer.encode(b"The second line, the second.")
    assert tokenizer.vocab_size == 22
    assert token_ids.dtype == np.uint8
    assert tokenizer.decode(token_ids.tolist()) == "The second line, the second."


@pytest.mark.parametrize("name", ["tokenizer.json", "spm.model"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    library = {"tokenizer.json": "tokenizers", "spm.model": "sentencepiece"}[name]
    (tmp_path / name).write_text("no tokenizer")
    expected = "not a" if importlib.util.find_spec(library) else rf"needs the {library} library.*gpipe-cli\[text\]"
    with pytest.raises(ConfigError, match=rf"^dataset.tokenizer=.*{name}: {expected}") as caught:
        load_tokenizer(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_library_that_is_not_installed_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"needs the tokenizers library, .*: pip install 'gpipe-cli\[text\]'"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_other_files_and_missing_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected null \(bytes\), a tokenizer.json .* or a .model file"):
        load_tokenizer(str(tmp_path / "vocab.txt"))
    with pytest.raises(ConfigError, match="no such file"):
        load_tokenizer(str(tmp_path / "missing.json"))


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    check_vocabulary(256, 256)
    with pytest.raises(ConfigError, match=r"^model.vocab_size=256: the tokenizer has 300 tokens.*use at least that"):
        check_vocabulary(256, 300)


def test_ids_take_the_smallest_type_that_holds_them() -> None:
    assert [token_dtype(size) for size in (256, 257, 65536, 65537)] == [np.uint8, np.uint16, np.uint16, np.uint32]
