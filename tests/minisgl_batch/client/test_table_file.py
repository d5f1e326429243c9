"""Tables as files: read back as they were, gone afterwards, and an error for a stream that breaks off."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from minisgl_batch.client.table_file import table_file
from minisgl_batch.errors import InvalidInputError


def test_a_table_is_in_its_file_while_it_is_needed(rng: random.Random) -> None:
    prompts = [f"prompt {rng.random()}" for _ in range(rng.randint(0, 50))]
    table = pa.table({"prompt": pa.array(prompts, pa.string())})
    with table_file(table) as path, pa.ipc.open_file(path) as file:
        assert file.read_all().equals(table)
    assert not Path(path).parent.exists()


def test_a_stream_that_breaks_off() -> None:
    first = pa.record_batch({"prompt": ["a"]})

    def batches() -> Iterator[pa.RecordBatch]:
        yield first
        raise ValueError("no more")

    stream = pa.RecordBatchReader.from_batches(first.schema, batches())
    with pytest.raises(InvalidInputError, match=r"the table can't be kept in .*no more"), table_file(stream):
        pass
