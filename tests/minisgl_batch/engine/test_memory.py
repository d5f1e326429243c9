"""The books on memory before the KV pool is made."""

from __future__ import annotations

import pytest

from minisgl_batch.engine.memory import check_balance
from minisgl_batch.errors import ModelError

GIB = 1 << 30


@pytest.mark.parametrize("available", [[5], [0, 0], [100 * GIB, 81 * GIB], [81 * GIB, 100 * GIB, 90 * GIB]])
def test_ranks_with_similar_memory_pass(available: list[int]) -> None:
    check_balance(available)


def test_a_rank_with_little_memory_is_named() -> None:
    with pytest.raises(ModelError, match=r"rank 1 has 70\.0 GiB .* rank 2 has 100\.0 GiB"):
        check_balance([90 * GIB, 70 * GIB, 100 * GIB])
