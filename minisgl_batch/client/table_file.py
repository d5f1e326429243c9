"""Tables in memory as files, which is what submissions read. Called by the client."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from minisgl_batch.errors import InvalidInputError


@contextmanager
def table_file(table: Any) -> Iterator[str]:
    """A table as an Arrow file for the time of a submission: read as files are, and never twice in memory.

    Args:
        table: anything with an Arrow stream.

    Raises:
        InvalidInputError: the stream fails, or there is no room for the file.
    """
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
        path = Path(folder) / "table.arrow"
        try:
            with (
                pa.RecordBatchReader.from_stream(table) as reader,
                pa.OSFile(str(path), "wb") as file,
                pa.ipc.new_file(file, reader.schema) as writer,
            ):
                for batch in reader:
                    writer.write_batch(batch)
        except (OSError, pa.ArrowException) as error:
            raise InvalidInputError(f"the table can't be kept in {folder}: {error}") from error
        yield str(path)
