"""The file of chosen algorithms: what was written is read, and nothing else is believed."""

from __future__ import annotations

import json
import logging
import random
import threading
from pathlib import Path

import pytest

from minisgl_kernels.algorithm_file import AlgorithmFile

LENGTH = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "matmul.json"


def test_choices_come_back(path: Path) -> None:
    choices = {f"key {i}": random.choice((None, random.randbytes(LENGTH))) for i in range(random.randrange(1, 30))}
    assert AlgorithmFile(path, LENGTH).read() == {}
    assert AlgorithmFile(path, LENGTH).add(choices) == choices
    assert AlgorithmFile(path, LENGTH).read() == choices
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_who_comes_first_is_right(path: Path) -> None:
    """All ranks and all later starts take what the first one chose."""
    first, second = random.randbytes(LENGTH), random.randbytes(LENGTH)
    AlgorithmFile(path, LENGTH).add({"a": first, "b": None})
    assert AlgorithmFile(path, LENGTH).add({"a": second, "b": second, "c": second}) == {
        "a": first,
        "b": None,
        "c": second,
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"algorithms": {}}',
        b'{"format": 2, "algorithms": {}}',
        b'{"format": 1, "algorithms": 3}',
        b'{"format": 1, "algorithms": [[1, null]]}',
        b"[" * 100_000,
        b'{"format": 1, "algorithms": {"a": 5}}',
        b'{"format": 1, "algorithms": {"a": "zz"}}',
        b'{"format": 1, "algorithms": {"a": "00"}}',
        b'{"format": 1, "algorithms": {"a": ""}}',
        b'{"format": 1, "algorithms": {"a": nu',
    ],
)
def test_a_damaged_file_is_made_anew(path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(content)
    file = AlgorithmFile(path, LENGTH)
    with caplog.at_level(logging.WARNING):
        assert file.read() == {}
    assert str(path) in caplog.text
    algorithm = random.randbytes(LENGTH)
    file.add({"a": algorithm})
    assert file.read() == {"a": algorithm}


def test_a_file_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert AlgorithmFile(tmp_path / "gone" / "matmul.json", LENGTH).add({"a": None}) == {"a": None}
    assert "can't be written" in caplog.text


def test_writers_at_once_leave_a_whole_file(path: Path) -> None:
    """Also for who reads meanwhile; a writer's choices may be lost, but never mixed with another's."""
    offered = [{f"key {i}": random.randbytes(LENGTH) for i in range(50)} for _ in range(8)]
    seen = []

    def write(choices: dict[str, bytes]) -> None:
        seen.append(AlgorithmFile(path, LENGTH).add(choices))

    threads = [threading.Thread(target=write, args=(choices,)) for choices in offered]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert len(json.loads(path.read_bytes())["algorithms"]) == 50
    for thread in threads:
        thread.join()
    assert len(seen) == len(offered)
    assert all(choices in offered for choices in [*seen, AlgorithmFile(path, LENGTH).read()])
