"""An input as one stream of records: a file of any format, a folder of files, or a dataset that `datasets` has saved.

Knows where each record is, so that a worker can read a chunk's rows where they lie. Knows nothing of rows. Called by
submissions (all records) and `references.py` (a chunk's).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from minisgl_batch.errors import InvalidInputError
from minisgl_batch.words import is_unicode
from minisgl_jobs.csv_rows import CsvFile
from minisgl_jobs.model import InputInfo
from minisgl_jobs.places import Place, files_below, open_binary, place
from minisgl_jobs.records import Record, RecordFile
from minisgl_jobs.sources import STDIN, Input, csv_separator, open_input, reading, refuse_foreign_formats
from minisgl_jobs.stores import safe_name
from minisgl_jobs.tables import TableFile, is_table

_DATASET, _SPLITS = "state.json", "dataset_dict.json"  # what `datasets` puts beside the files it saves
_CSV_NAMES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst")
_HEAD_BYTES = 8


class Columns:
    """Which columns of a table are read, and by which option."""

    def __init__(
        self, wanted: Mapping[str, str] | None = None, keep: Sequence[str] = (), *, settings: bool = True
    ) -> None:
        """
        Args:
            wanted: column that makes the prompts -> the option that names it; without any, columns mean what they are
                called.
            keep: columns that are copied to the output.
            settings: whether, beside these, columns mean something by their names.
        """
        self.settings = settings
        self.wanted = dict(wanted or {})
        self.keep = tuple(keep)


class JsonLines:
    """A file of JSON lines as a `RecordFile`. Its positions are bytes."""

    def __init__(self, lines: Input) -> None:
        self.position = 0
        self.line = 0
        self._lines = lines
        refuse_foreign_formats(lines.name, lines.head())

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            self.line += 1
            self.position = self._lines.position
            yield line

    @property
    def lines_read(self) -> int:
        return self.line

    def skip_to(self, position: int, lines_read: int) -> None:
        """Go on with the line that begins at byte `position`."""
        self._lines.skip_to(position)
        self.position, self.line = position, lines_read

    def info(self) -> InputInfo:
        return self._lines.info()

    def close(self) -> None:
        self._lines.close()


class Records:
    """The records of an input, in order. Iterate once; use as a context manager.

    Attributes:
        name: of the input as the user gave it.
        uri: where workers find it; "" where only this process does.
        file, line, place: where the last record is, for messages; see `Fault`.

    Raises (while iterating, too):
        InvalidInputError: a file can't be read, or is of another kind than the first.
    """

    def __init__(self, name: str, root: Place | None, files: Sequence[str], columns: Columns, *, uri: str = "") -> None:
        self.name = name
        self.uri = uri
        self.file = name
        self._root = root
        self._files = files
        self._columns = columns
        self._infos: list[InputInfo] = []
        self._since_mark: list[str] = []
        self._mark = (0, 0)
        self._kind: type | None = None
        self._number = 0
        self._current = self._open()

    @property
    def line(self) -> int:
        return self._current.line

    @property
    def place(self) -> str:
        if self._files[self._number]:
            return f"{self._files[self._number]}:{self.line}"
        return f"row {self.line}" if isinstance(self._current, TableFile) else ""

    def __iter__(self) -> Iterator[Record]:
        while True:
            yield from self._current
            self._infos.append(self._current.info())
            if self._number + 1 == len(self._files):
                return
            self._current.close()
            self._number += 1
            self._current = self._open()

    def mark(self) -> tuple[tuple[str, ...], int, int]:
        """Where the records since the last mark are: their files, and position and line in the first of them.

        Called whenever a chunk is complete.
        """
        files, start = tuple(self._since_mark), self._mark
        self._since_mark = [self._files[self._number]]
        self._mark = (self._current.position, self._current.lines_read)
        return files, *start

    def info(self) -> InputInfo:
        """What was read; of several files, the hash of their hashes."""
        infos = self._infos if len(self._infos) == len(self._files) else [*self._infos, self._current.info()]
        if len(self._files) == 1:
            return InputInfo(self.name, infos[0].sha256, infos[0].num_bytes)
        is_whole = len(infos) == len(self._files) and all(info.sha256 for info in infos)
        digest = hashlib.sha256("".join(info.sha256 for info in infos).encode()).hexdigest() if is_whole else ""
        return InputInfo(self.name, digest, sum(info.num_bytes for info in infos))

    def close(self) -> None:
        self._current.close()

    def _open(self) -> RecordFile:
        file = self._files[self._number]
        self.file = f"{self.name}/{file}" if file else self.name
        opened = STDIN if self._root is None else (self._root / file if file else self._root)
        current = open_records(opened, self.file, self._columns)
        if self._kind not in (None, type(current)):
            current.close()
            raise InvalidInputError(f"{self.file} is of another format than the files before: give one kind of files")
        self._kind = type(current)
        self._since_mark.append(file)
        if len(self._since_mark) == 1:
            self._mark = (current.position, current.lines_read)
        return current

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_source(source: str | os.PathLike[str], columns: Columns | None = None) -> Records:
    """Open what a user names: a path, a URL, or "-" for stdin.

    Raises:
        InvalidInputError: there is nothing, it can't be read, or lacks a column.
        UsageError: nothing installed reads such a URL.
    """
    given, columns = os.fspath(source), columns or Columns()
    if given == STDIN:
        return Records("stdin", None, [""], columns)
    name = safe_name(given)
    with reading(name):
        root = place(given)
        files = _files_of(name, root) if root.is_dir() else [""]
    for path in (name, str(root), *files):
        if not is_unicode(path):
            raise InvalidInputError(f"{path!r} isn't valid Unicode, and jobs name their inputs: give it another name")
    # A signed URL is for this process alone, as jobs store the URLs of their inputs; and a pipe can be read once.
    is_for_all = name == given and not _is_pipe(root)
    return Records(name, root, files, columns, uri=str(root) if is_for_all else "")


def open_records(
    path: Place | str, name: str, columns: Columns, *, hashed: bool = True, pipes: bool = True
) -> RecordFile:
    """Open one file of any format.

    Args:
        pipes: whether it may be a local pipe, which is waited for.

    Raises:
        InvalidInputError: it can't be read, or lacks a column.
    """
    if not isinstance(path, str) and not (pipes and _is_pipe(path)):
        with reading(name), open_binary(path) as file:
            head = file.read(_HEAD_BYTES) or b""
        if is_table(head):
            wanted, keep = columns.wanted, columns.keep
            return TableFile(path, name, head, wanted=wanted, keep=keep, settings=columns.settings, hashed=hashed)
    lines = open_input(path, name, pipes=pipes)
    try:
        if name.lower().endswith(_CSV_NAMES) or csv_separator(lines.head()) is not None:
            return CsvFile(lines, wanted=columns.wanted, keep=columns.keep, settings=columns.settings)
        return JsonLines(lines)
    except BaseException:
        lines.close()
        raise


def _is_pipe(path: Place) -> bool:
    return isinstance(path, Path) and path.exists() and not path.is_file() and not path.is_dir()


def _files_of(name: str, folder: Place) -> list[str]:
    """The files of a folder that hold rows, in order."""
    found = files_below(folder)
    if _SPLITS in found:
        splits = json.loads((folder / _SPLITS).read_bytes()).get("splits", [])
        raise InvalidInputError(f"{name} holds several splits: give one of {', '.join(f'{name}/{s}' for s in splits)}")
    if _DATASET in found and "dataset_info.json" in found:
        files = json.loads((folder / _DATASET).read_bytes()).get("_data_files", [])
        found = [entry["filename"] for entry in files]
    else:
        # As data tools do, pass over what begins with an underscore or a dot.
        found = [file for file in found if not any(part.startswith(("_", ".")) for part in file.split("/"))]
    if not found:
        raise InvalidInputError(f"{name} is a folder without files to read")
    return found
