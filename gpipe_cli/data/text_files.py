"""Text files of any size as a stream of whole lines in UTF-8, or one line that says what is wrong with them."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from gpipe_cli.errors import ConfigError

PIECE_BYTES = 2**20  # read at a time; a longer line is cut between two characters
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def find_text_files(path: str) -> list[Path]:
    """The file, all files below the folder but hidden ones, or the files that match the pattern; sorted by path.

    Raises ConfigError when there is none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        files = [
            file
            for file in sorted(root.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts)
        ]
        problem = "the folder holds no file"
    else:
        files = [Path(match) for match in sorted(glob.glob(str(root), recursive=True)) if Path(match).is_file()]
        problem = "no such file or folder"
    if not files:
        raise ConfigError("dataset.path", path, f"{problem}; give a text file, a folder of them, or a pattern '*.txt'")
    return files


def read_pieces(files: list[Path], piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The files' bytes one after another, in pieces that end where a line ends if at all possible.

    A byte order mark is left out, and a line end is added to a file without one, so that no two files share a line.
    Raises ConfigError with the file, and the offset of what is not UTF-8; for an empty file too.
    """
    for file in files:
        try:
            yield from _file_pieces(file, piece_bytes)
        except OSError as error:
            raise ConfigError("dataset.path", file, f"cannot be read: {error.strerror}") from None


def _file_pieces(file: Path, piece_bytes: int) -> Iterator[bytes]:
    rest, offset, last = b"", 0, b""
    with open(file, "rb") as stream:
        if stream.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK:
            offset = len(_BYTE_ORDER_MARK)
        stream.seek(offset)
        while block := stream.read(piece_bytes):
            piece = rest + block
            end = piece.rfind(b"\n") + 1 or _last_character(piece)
            rest = piece[end:]
            if piece[:end]:
                yield _valid(piece[:end], file, offset)
                last = piece[end - 1 : end]
            offset += end
    if rest:
        yield _valid(rest, file, offset)
        last = rest[-1:]
    if not last:
        raise ConfigError("dataset.path", file, "the file is empty; remove it, or give another")
    if last != b"\n":
        yield b"\n"


def _last_character(piece: bytes) -> int:
    """Where the last character of the piece begins, which may go on in the next one."""
    start = len(piece) - 1
    while start > max(0, len(piece) - 4) and piece[start] & 0xC0 == 0x80:
        start -= 1
    return start


def _valid(piece: bytes, file: Path, offset: int) -> bytes:
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError as error:
        where = offset + error.start
        problem = f"byte 0x{piece[error.start]:02x} at offset {where} is not UTF-8"
        utf16 = where == 0 and piece[:2] in (b"\xff\xfe", b"\xfe\xff")
        remedy = f"convert the file, for example with iconv -f {'UTF-16' if utf16 else 'LATIN1'} -t UTF-8"
        raise ConfigError("dataset.path", file, f"{problem}; {remedy}") from None
    return piece
