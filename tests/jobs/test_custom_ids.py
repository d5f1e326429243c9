"""The index of custom_ids answers as a dict would, in a fraction of the memory."""

from __future__ import annotations

import random
import tracemalloc

from minisgl_jobs.custom_ids import CustomIdIndex


def test_same_answers_as_a_dict(rng: random.Random) -> None:
    index, reference = CustomIdIndex(), {}
    for line in range(1, 20_000):
        custom_id = f"row-{rng.randrange(10_000)}"
        assert index.add(custom_id, line) == reference.get(custom_id)
        reference.setdefault(custom_id, line)


def test_memory_per_id() -> None:
    tracemalloc.start()
    try:
        index = CustomIdIndex()
        for line in range(30_000):
            index.add(f"row-{line}", line)
        assert tracemalloc.get_traced_memory()[0] < 40 * 30_000
    finally:
        tracemalloc.stop()
