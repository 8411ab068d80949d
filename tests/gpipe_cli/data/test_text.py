from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpipe_cli.data import text as text_module
from gpipe_cli.data.python_topics import python_topics
from gpipe_cli.data.text import TextBlocks, TextSource, num_blocks, open_text, prepare_text, read_tokens
from gpipe_cli.errors import ConfigError, DataError

LINES = "".join(f"line {number}\n" for number in range(100))


@pytest.fixture
def source(tmp_path: Path) -> Any:
    """`source("text", …)`: that content in a file; `source({"train/a": "text"})`: a folder of files."""

    def make(content: str | dict[str, str], **changes: Any) -> TextSource:
        path = tmp_path / "data"
        for name, text in ({"": content} if isinstance(content, str) else content).items():
            file = path / name if name else path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode())
        return TextSource(path=str(path), cache=str(tmp_path / "cache"), **changes)

    return make


def text_of(source: TextSource, split: Any) -> str:
    return bytes(read_tokens(source, split)).decode()


def test_the_embedded_text_needs_no_path_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    train, held_out = python_topics()
    info = prepare_text(TextSource(), seq_len=64)
    assert (info.num_train, info.num_eval) == ((len(train) - 1) // 64, (len(held_out) - 1) // 64)
    assert (info.vocab_size, info.num_classes, info.eval_bytes_per_token, info.classes) == (256, 256, 1.0, ())
    assert bytes(read_tokens(TextSource(), "eval")) == held_out
    assert list(tmp_path.iterdir()) == []


def test_targets_are_the_inputs_one_token_later_and_every_token_but_the_first_is_predicted_once() -> None:
    blocks = TextBlocks(np.arange(14, dtype=np.uint8), seq_len=4)
    assert len(blocks) == 3
    assert blocks[0][0].tolist() == [0, 1, 2, 3]
    assert blocks[0][1].tolist() == [1, 2, 3, 4]
    assert torch.cat([blocks[index][1] for index in range(3)]).tolist() == list(range(1, 13))
    assert blocks[2][0].dtype == torch.int64
    with pytest.raises(IndexError):
        blocks[3]


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_block_takes_one_token_more_than_it_predicts(num_tokens: int, blocks: int) -> None:
    assert num_blocks(num_tokens, 4) == blocks


def test_the_last_part_is_held_out_and_nothing_is_lost(source: Any) -> None:
    made = source(LINES, held_out=0.25)
    info = prepare_text(made, seq_len=8)
    train, held_out = text_of(made, "train"), text_of(made, "eval")
    assert train + held_out == LINES
    assert len(held_out) == pytest.approx(0.25 * len(LINES), abs=1)
    assert info.num_eval == (len(held_out) - 1) // 8


@pytest.mark.parametrize("num_characters", [99, 101])  # a tenth from the end begins, or is within, a character
def test_text_is_split_between_characters(source: Any, num_characters: int) -> None:
    made = source("ü" * num_characters)
    prepare_text(made, seq_len=2)
    train, held_out = text_of(made, "train"), text_of(made, "eval")
    assert train + held_out == "ü" * num_characters + "\n"
    assert len(held_out) == 11  # ten characters and the line end


def test_the_split_is_the_same_in_whatever_pieces_the_text_is_read(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = source({"1": LINES, "2": LINES.upper()}, held_out=0.6)
    prepare_text(made, seq_len=8)
    expected = text_of(made, "train"), text_of(made, "eval")
    genuine = text_module.read_pieces
    monkeypatch.setattr(text_module, "read_pieces", lambda files: genuine(files, 40))
    prepare_text(made, seq_len=8)
    assert (text_of(made, "train"), text_of(made, "eval")) == expected


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_folders_say_what_is_held_out(source: Any, name: str) -> None:
    made = source({"train/b.txt": "second\n" * 5, "train/a.txt": "first\n" * 5, f"{name}/c.txt": "third\n" * 5})
    prepare_text(made, seq_len=4)
    assert text_of(made, "train") == "first\n" * 5 + "second\n" * 5
    assert text_of(made, "eval") == "third\n" * 5


def test_two_held_out_folders_are_a_question(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"holds val/ and test/; which one is held out"):
        prepare_text(source({"train/a": LINES, "val/a": LINES, "test/a": LINES}), seq_len=4)


def test_text_is_tokenised_once(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = source(LINES)
    first = prepare_text(made, seq_len=8)
    monkeypatch.setattr(text_module, "write_entry", lambda *arguments: pytest.fail("tokenised again"))
    assert prepare_text(made, seq_len=8) == first
    assert prepare_text(made, seq_len=4).num_train > first.num_train


def test_changed_content_and_another_split_are_another_entry(source: Any) -> None:
    digests = set()
    for content, changes in ((LINES, {}), (LINES.replace("7", "8"), {}), (LINES, {"held_out": 0.3})):
        digests.add(prepare_text(source(content, **changes), seq_len=8).text_digest)
    assert len(digests) == 3


def test_a_damaged_entry_is_made_again(source: Any, tmp_path: Path) -> None:
    made = source(LINES)
    prepare_text(made, seq_len=8)
    (file,) = (tmp_path / "cache").glob("*/train.bin")
    file.write_bytes(b"short")
    prepare_text(made, seq_len=8)
    assert text_of(made, "train") + text_of(made, "eval") == LINES


def test_text_that_changes_during_a_run_is_one_line(source: Any) -> None:
    prepare_text(source(LINES), seq_len=8)
    with pytest.raises(DataError, match="is not the text that was prepared; do not change the data during a run"):
        open_text(source(LINES + "more\n"), "train", 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("short\n", r"^dataset.path=.*: \d+ training tokens are fewer than one block of 9; use more text or a smaller"),
        ("a longer text, whose last tenth is short\n", r": \d held-out tokens are fewer than one block of 9"),
        ({"train/a": LINES, "val/a": "x"}, r": 2 held-out tokens are fewer than one block of 9"),
        ({"a": LINES, "b": ""}, r"/b: the file is empty"),
    ],
)
def test_too_little_text_is_one_line(source: Any, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        prepare_text(source(content), seq_len=8)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_one_line_and_leave_no_cache(source: Any, tmp_path: Path) -> None:
    made = source("fine\n" * 40)
    Path(str(made.path)).write_bytes(b"fine\n" * 40 + b"\xff")
    with pytest.raises(ConfigError, match=r"byte 0xff at offset 200 is not UTF-8"):
        prepare_text(made, seq_len=8)
    assert not (tmp_path / "cache").exists()


def test_large_files_are_mapped_not_read(source: Any) -> None:
    made = source(LINES)
    prepare_text(made, seq_len=8)
    assert isinstance(open_text(made, "train", 8).tokens, np.memmap)


def test_the_facts_hold_plain_values_only(source: Any) -> None:
    info = prepare_text(source(LINES), seq_len=8)
    assert {type(value) for value in vars(info).values()} == {str, int, float, tuple}
