from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpipe_cli.data.text_files import find_text_files, read_pieces
from gpipe_cli.errors import ConfigError


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_folder_is_searched_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", ".hidden", ".git/config", "a/b.md"):
        write(tmp_path / name, b"x")
    found = [file.relative_to(tmp_path).as_posix() for file in find_text_files(str(tmp_path))]
    assert found == ["a/b.md", "a/z.txt", "b.txt"]


def test_a_file_and_a_pattern_are_taken(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.txt", b"x"), write(tmp_path / "2.txt", b"x")
    write(tmp_path / "3.md", b"x")
    assert find_text_files(str(one)) == [one]
    assert find_text_files(str(tmp_path / "*.txt")) == [one, two]


@pytest.mark.parametrize(
    ("name", "problem"), [("missing.txt", "no such file or folder"), ("", "the folder holds no file")]
)
def test_no_file_is_one_line(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dataset.path=.*: {problem}; give a text file"):
        find_text_files(str(tmp_path / name))


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 1000])
def test_pieces_are_the_files_one_after_another_cut_between_characters(tmp_path: Path, piece_bytes: int) -> None:
    content = "ein Übel\nzwei €uro und ein 🎈 ohne Ende"
    first, second = write(tmp_path / "1", content.encode()), write(tmp_path / "2", b"more\n")
    pieces = list(read_pieces([first, second], piece_bytes))
    assert b"".join(pieces).decode() == content + "\nmore\n"
    assert "".join(piece.decode() for piece in pieces)  # every piece by itself is valid


def test_pieces_end_with_lines_where_lines_are_short(tmp_path: Path) -> None:
    file = write(tmp_path / "1", b"one\ntwo\nthree\n" * 50)
    assert all(piece.endswith(b"\n") for piece in read_pieces([file], 32))


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    assert b"".join(read_pieces([write(tmp_path / "1", b"\xef\xbb\xbfhi\n")])) == b"hi\n"


@pytest.mark.parametrize("piece_bytes", [4, 16, 1000])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_what_is_not_utf8_is_named_with_its_offset(tmp_path: Path, piece_bytes: int, start: bytes) -> None:
    file = write(tmp_path / "latin.txt", start + b"first line\nsch\xf6n und gut\n")
    offset = len(start) + 14
    with pytest.raises(
        ConfigError, match=rf"latin.txt: byte 0xf6 at offset {offset} is not UTF-8; .*iconv -f LATIN1"
    ) as e:
        list(read_pieces([file], piece_bytes))
    assert "\n" not in str(e.value)


def test_a_file_that_ends_within_a_character_is_not_utf8(tmp_path: Path) -> None:
    file = write(tmp_path / "cut.txt", "price: 5 €".encode()[:-1])
    with pytest.raises(ConfigError, match=r"byte 0xe2 at offset 9 is not UTF-8"):
        list(read_pieces([file], 4))


def test_utf16_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"byte 0xff at offset 0 is not UTF-8; .* iconv -f UTF-16 -t UTF-8"):
        list(read_pieces([write(tmp_path / "16.txt", "hello\n".encode("utf-16"))]))


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"nothing.txt: the file is empty"):
        list(read_pieces([write(tmp_path / "nothing.txt", content)]))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_one_line(tmp_path: Path) -> None:
    file = write(tmp_path / "secret.txt", b"x")
    file.chmod(0)
    with pytest.raises(ConfigError, match=r"secret.txt: cannot be read: Permission denied"):
        list(read_pieces([file]))
