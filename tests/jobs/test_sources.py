"""Opening inputs: compression, stdin, what was read, and files that aren't JSONL."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from minisgl_batch.errors import InvalidInputError, UsageError
from minisgl_jobs.inputs import open_source
from minisgl_jobs.model import InputInfo
from minisgl_jobs.rows import ReadOptions, RowReader
from minisgl_jobs.sources import open_input


def make_rows(num_rows: int) -> bytes:
    return "".join(f'{{"prompt": "row {i} é"}}\r\n' for i in range(num_rows)).encode()


def read_all(source: str | Path, limit: int | None = None) -> tuple[int, InputInfo]:
    with open_input(source) as opened:
        reader = RowReader(opened.name, ReadOptions(limit=limit))
        num_rows = sum(1 for _ in reader.rows(opened))
        return num_rows, opened.info()


COMPRESSIONS = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "gzip in two members": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    "zstd in two frames": lambda data: zstandard.compress(data[:50]) + zstandard.compress(data[50:]),
    "zstd after a skippable frame": lambda data: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(data),
    "with a byte order mark": lambda data: b"\xef\xbb\xbf" + data + b"\n\n",
}


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_rows_size_and_hash_whatever_the_compression(name: str, tmp_path: Path, rng: random.Random) -> None:
    num_rows = rng.randint(10, 30_000)
    content = COMPRESSIONS[name](make_rows(num_rows))
    path = tmp_path / "rows"
    path.write_bytes(content)
    assert read_all(path) == (num_rows, InputInfo(str(path), hashlib.sha256(content).hexdigest(), len(content)))
    limited, info = read_all(path, limit=3)
    assert (limited, info.sha256) == (3, hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("name", ["plain", "gzip", "zstd"])
def test_stdin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = COMPRESSIONS[name](make_rows(20))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert read_all("-") == (20, InputInfo("-", hashlib.sha256(content).hexdigest(), len(content)))
    assert not sys.stdin.buffer.closed


def test_pipe_that_trickles_and_is_left_early() -> None:
    script = """
        import sys
        from minisgl_jobs.rows import ReadOptions, RowReader
        from minisgl_jobs.sources import open_input
        with open_input("-") as source:
            for row in RowReader(source.name, ReadOptions(limit=2)).rows(source):
                print(row.prompt, flush=True)
            print(repr(source.info().sha256))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for piece in (b"{", b'"prompt": "a"}', b"\n"):
            reader.stdin.write(piece)
            reader.stdin.flush()
        assert reader.stdout.readline() == b"a\n"  # before the pipe is closed
        reader.stdin.write(b'{"prompt": "b"}\n{"prompt": "c"}\n')
        reader.stdin.flush()
        assert reader.stdout.readline() == b"b\n"
        assert reader.stdout.readline() == b"''\n"
        reader.stdin.close()


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_truncated_or_damaged_compression_is_an_error(compress, tmp_path: Path, rng: random.Random) -> None:
    content = compress(make_rows(20_000))
    path = tmp_path / "rows.gz"
    for cut in (len(content) - 1, rng.randrange(8, len(content) - 1)):
        path.write_bytes(content[:cut])
        with pytest.raises(InvalidInputError, match=r"rows\.gz can't be read: the compressed data ends too early"):
            read_all(path)
    path.write_bytes(content + b"garbage")
    with pytest.raises(InvalidInputError, match=r"rows\.gz can't be read"):
        read_all(path)


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    path = tmp_path / "rows.zst"
    with zstandard.open(path, "wb") as file:
        for _ in range(30):
            file.write((b'{"prompt": "' + b"a" * 1500 + b'"}\n') * 1000)
    tracemalloc.start()
    try:
        assert read_all(path)[0] == 30_000
        assert tracemalloc.get_traced_memory()[1] < 8 << 20  # of 45 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'[{"prompt": "a"}]', "one JSON array"),
        (b'[\n  {"prompt": "a"},\n  {"prompt": "b"}\n]\n', "one JSON array"),
        (b'[{"prompt": "a"},\n{"prompt": "b"}]\n', "one JSON array"),
        (b'\xef\xbb\xbf[{"prompt": "a"}]', "one JSON array"),
        (b'{\n  "prompt": "a"\n}\n', "spread over lines"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "UTF-16"),
        (b"BZh91AY&SY", "bzip2"),
        (bytes(9), "begins with zero bytes"),
        (b"\xfd7zXZ\x00\x00\x04", "xz"),
        (b"PK\x03\x04\x14\x00", "zip archive"),
    ],
)
def test_files_that_are_not_jsonl(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "in.dat"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=words) as caught:
        open_source(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("content", [b"hello, world\n", b"one line\nand another, too\n", b'["a"]\n{"prompt": "b"}\n'])
def test_odd_lines_are_left_to_the_reader(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with open_input(path) as source:
        assert b"".join(source) == content


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is a folder"):
        open_input(tmp_path)
    with pytest.raises(InvalidInputError, match=r"missing\.jsonl: there is no such file"):
        open_input(tmp_path / "missing.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="can't be read: Not a directory"):
        open_input(tmp_path / "file" / "rows.jsonl")
    with pytest.raises(UsageError, match="is not a path"):
        open_input("a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.touch(mode=0)
    with pytest.raises(InvalidInputError, match="Permission denied"):
        open_input(path)
