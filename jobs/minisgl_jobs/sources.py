"""Opens a text (a file anywhere or stdin, plain, gzip or zstd) as a stream of lines, and knows what was read.

Memory stays constant whatever the input's size. Knows nothing of rows: a line is bytes. `inputs.py`, which calls it,
makes one input of several files and of other formats.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pyarrow as pa

from minisgl_batch.errors import InputUnavailableError, InputUnreachableError, InvalidInputError
from minisgl_jobs.model import InputInfo
from minisgl_jobs.places import Place, RemotePath, open_binary, place
from minisgl_jobs.stores import is_of_name, url_scheme

MAX_LINE_BYTES = (
    64 << 20
)  # of one row; a longer line is cut one byte after this, so that the reader sees it is too long
STDIN = "-"
_BUFFER_BYTES = 1 << 20
_SNIFF_BYTES = 1 << 16
BOM = b"\xef\xbb\xbf"

_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_FOREIGN_FORMATS = {
    b"BZh": "is compressed with bzip2; gzip and zstd are read: bzip2 -dc {name} | gzip > rows.jsonl.gz",
    b"\xfd7zXZ\x00": "is compressed with xz; gzip and zstd are read: xz -dc {name} | gzip > rows.jsonl.gz",
    b"PK\x03\x04": "is a zip archive or a spreadsheet; JSONL, CSV, Parquet and Arrow files are read",
    b"\0": "begins with zero bytes; JSONL, CSV, Parquet and Arrow files are read: is it whole, and the right file?",
    b"\xff\xfe": "is UTF-16 text; UTF-8 is read: iconv -f UTF-16 -t UTF-8 {name} > rows.jsonl",
    b"\xfe\xff": "is UTF-16 text; UTF-8 is read: iconv -f UTF-16 -t UTF-8 {name} > rows.jsonl",
}


class _HashingReader(io.RawIOBase):
    """Passes bytes on and keeps their SHA-256 and number."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        # A buffered stream's readinto waits until the buffer is full; a pipe's rows should come as they are written.
        self._readinto = getattr(raw, "readinto1", raw.readinto)
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self.at_end = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_read = self._fill(memoryview(buffer), 8 if self.num_bytes == 0 else 1)
        self.sha256.update(memoryview(buffer)[:num_read])
        self.num_bytes += num_read
        self.at_end = num_read == 0
        return num_read

    def _fill(self, buffer: memoryview, least: int) -> int:
        """Read until `least` bytes are there (the first read must show a whole magic number) or the input ends."""
        num_read = 0
        while num_read < least and (got := self._readinto(buffer[num_read:])):
            num_read += got
        return num_read

    def is_regular_file(self) -> bool:
        try:
            return stat.S_ISREG(os.fstat(self._raw.fileno()).st_mode)
        except (OSError, AttributeError):  # a stream without a file below it
            return False

    def seekable(self) -> bool:
        return bool(self._raw.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        """For readers of a part of the input: what was read is hashed no more."""
        return int(self._raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self._raw.tell())

    def close(self) -> None:
        if self._raw is not getattr(sys.stdin, "buffer", None):
            self._raw.close()
        super().close()


class Input:
    """An open text: iterate over its lines once, then ask `info()`. Use as a context manager.

    Lines are bytes with their line end (LF or CRLF). A line longer than MAX_LINE_BYTES comes cut to one byte more.

    Attributes:
        position: bytes before the next line, decompressed.

    Raises:
        InvalidInputError: while iterating, when the data can't be read or its compression is damaged.
    """

    def __init__(self, name: str, source: str, raw: Any) -> None:
        self.name = name
        self.position = 0
        self._source = source
        self._hashing = _HashingReader(raw)
        self._is_plain = True
        self._lines = self._decompressed()

    def __iter__(self) -> Iterator[bytes]:
        readline = self._lines.readline
        limit = MAX_LINE_BYTES + 1
        try:
            while line := readline(limit):
                self.position += len(line)
                rest = line
                while len(rest) == limit and rest[-1:] != b"\n":  # drop the rest of a line that is too long
                    rest = readline(limit)
                    self.position += len(rest)
                yield line
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def head(self) -> bytes:
        """The first bytes, decompressed; they stay to be read."""
        return self._peek(self._lines)

    def skip_to(self, position: int) -> None:
        """Go on with the line that begins at a `position` that an earlier reader had here."""
        try:
            if self._is_plain and position - self.position > _SNIFF_BYTES and self._hashing.seekable():
                self._lines.seek(position)
                self.position = position
            while self.position < position:
                read = self._lines.read(min(_BUFFER_BYTES, position - self.position))
                if not read:
                    raise InvalidInputError(f"{self.name} has become shorter")
                self.position += len(read)
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def info(self) -> InputInfo:
        """What was read.

        A file that wasn't read to its end (`limit`) is hashed to its end; a pipe is left as it is, and `sha256` is "".
        """
        if self._hashing.is_regular_file():
            try:
                while self._hashing.read(_BUFFER_BYTES):
                    pass
            except OSError as error:
                raise _unreadable(self.name, error) from error
        digest = self._hashing.sha256.hexdigest() if self._hashing.at_end else ""
        return InputInfo(self._source, digest, self._hashing.num_bytes)

    def close(self) -> None:
        self._hashing.close()

    def __enter__(self) -> Input:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _decompressed(self) -> io.BufferedReader:
        hashing: Any = self._hashing
        plain = io.BufferedReader(hashing, _BUFFER_BYTES)
        head = self._peek(plain)
        codec = next((codec for magic, codec in _CODECS.items() if head.startswith(magic)), None)
        if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # a skippable frame, as parallel zstd tools write first
            codec = "zstd"
        if codec is None:
            return plain
        self._is_plain = False
        # Unlike the codecs' own readers this one notices a truncated stream, and it joins concatenated ones.
        stream: Any = pa.CompressedInputStream(pa.PythonFile(plain, mode="r"), codec)
        return io.BufferedReader(stream, _BUFFER_BYTES)

    def _peek(self, stream: io.BufferedReader) -> bytes:
        try:
            return stream.peek(_SNIFF_BYTES)[:_SNIFF_BYTES]
        except OSError as error:
            raise _unreadable(self.name, error) from error


def open_input(source: str | os.PathLike[str] | Place, name: str = "", *, pipes: bool = True) -> Input:
    """Open a path, a URL, or stdin for "-"; gzip and zstd are recognised by their first bytes, whatever the name.

    Args:
        name: of the input in messages, by default as it is given.
        pipes: whether it may be a local pipe, which is waited for.

    Raises:
        InvalidInputError: there is no such file, or it can't be read.
        UsageError: nothing installed reads such a URL.
    """
    if source == STDIN:
        if sys.stdin is None:
            raise InvalidInputError("stdin is closed: give a file")
        return Input("stdin", STDIN, sys.stdin.buffer)
    name = name or str(source)
    with reading(name):
        raw = open_binary(source if isinstance(source, RemotePath) else place(source), pipes=pipes)
    try:
        return Input(name, name, raw)
    except BaseException:
        raw.close()
        raise


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Say what is wrong with an input that can't be opened.

    Raises:
        InputUnreachableError: it can't be opened or read.
        InputUnavailableError: it can't now, as its store or disk fails.
        InvalidInputError: it is damaged.
    """
    try:
        yield
    except IsADirectoryError:
        raise InputUnreachableError(f"{name} is a folder where a file should be") from None
    except FileNotFoundError:
        where = "" if url_scheme(name) else f" (looked in {os.getcwd()})"
        raise InputUnreachableError(f"{name}: there is no such file{where}") from None
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> InvalidInputError:
    """What is wrong with an input: with the machine, which gives an error number, or with the data."""
    reason = getattr(error, "strerror", None) or str(error)
    if "Truncated" in reason:
        reason = "the compressed data ends too early; is the file whole?"
    message = f"{name} can't be read: {reason}"
    if not isinstance(error, OSError) or error.errno is None:
        return InvalidInputError(message)
    return InputUnreachableError(message) if is_of_name(error) else InputUnavailableError(message)


def object_lines(rows: Iterable[Any]) -> Iterator[bytes]:
    """The rows of a program as lines, so that they are checked like a file's.

    A string is a prompt, and a list is one of token ids or, as in vLLM's `LLM.chat`, a chat's messages.

    Raises:
        InvalidInputError: a row holds something that JSON can't express.
    """
    return (_object_line(number, row) for number, row in enumerate(rows, 1))


def _object_line(number: int, row: Any) -> bytes:
    try:
        return json.dumps(_as_fields(row)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"row {number} can't be written as JSON: {error}") from error


def _as_fields(row: Any) -> Any:
    if isinstance(row, str):
        return {"prompt": row}
    if isinstance(row, list | tuple):
        return {"prompt_token_ids" if row and isinstance(row[0], int) else "messages": row}
    return row


def refuse_foreign_formats(name: str, head: bytes) -> None:
    """Raise when the first bytes show a file that isn't JSONL, so that one line says so instead of a fault per line."""
    what = next((what for magic, what in _FOREIGN_FORMATS.items() if head.startswith(magic)), None)
    lines = [line for line in head.removeprefix(BOM).split(b"\n") if line.strip()]
    if what is None and lines:
        first = lines[0].strip()
        if first.startswith(b"[") and (len(lines) == 1 or not _is_json(first)):
            what = "holds one JSON array; a row a line is read: jq -c '.[]' {name} > rows.jsonl"
        elif first == b"{":
            what = "holds JSON objects spread over lines; a row a line is read: jq -c . {name} > rows.jsonl"
    if what is not None:
        raise InvalidInputError(f"{name} {what.replace('{name}', name)}")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def csv_separator(head: bytes) -> str | None:
    """What separates the columns where the first bytes look like CSV: a header of plain names, and as many cells."""
    lines = [line for line in head.removeprefix(BOM).split(b"\n") if line.strip()]
    header = re.fullmatch(rb'"?\w[\w -]*"?(?:([,;\t])"?\w[\w -]*"?)+', lines[0].strip()) if lines else None
    if header is None or len(lines) < 2 or any(line.lstrip().startswith(b"{") for line in lines):
        return None
    separator = header[1]
    return separator.decode() if lines[1].count(separator) >= lines[0].count(separator) else None
