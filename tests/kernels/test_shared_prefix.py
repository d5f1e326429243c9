"""Decode rows that go on from what they have seen of a shared prefix, against rows that read all of it themselves."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from minisgl_kernels.paged_attention import paged_attention
from minisgl_kernels.shared_prefix import PrefixGroups, attend_to_prefixes
from tests.kernels.errors import DTYPES, relative_error
from tests.kernels.paged import random_case


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_get_what_they_get_alone(device: torch.device, with_sinks: bool) -> None:
    """To the last bit on a GPU; the interpreter multiplies tiles of different sizes differently."""
    on_gpu = device.type == "cuda"
    shapes = [(2, 128, 16), (5, 128, 16), (8, 64, 32), (1, 256, 16)] if on_gpu else [(5, 64, 16)]
    dtypes = DTYPES if on_gpu else [random.choice(DTYPES)]
    for (group, head_dim, page_size), dtype in itertools.product(shapes, dtypes):
        # Rows and pages of each group; the second one's prefix is shorter than a block, the third has no rows.
        groups = [(40, 20), (9, 1), (0, 0), (30, 33), (1, 9)] if on_gpu else [(2, 5), (2, 1), (0, 0)]
        num_rows = sum(rows for rows, _ in groups) + 3
        prefix_pages = [pages for rows, pages in groups for _ in range(rows)] + [0] * 3
        kv_lens = [pages * page_size + random.randint(1, 90) for pages in prefix_pages]
        case = random_case(device, kv_lens, None, group=group, head_dim=head_dim, page_size=page_size, dtype=dtype)
        table, slots, first = case.rows.page_table, case.rows.slots.long(), 0
        lines = torch.zeros((len(groups), table.shape[1]), dtype=torch.int32, device=device)
        for number, (rows, pages) in enumerate(groups):
            if rows:
                lines[number, :pages] = table[slots[first], :pages]
                table[slots[first : first + rows], :pages] = lines[number, :pages]
            first += rows
        shared = PrefixGroups(
            starts=torch.tensor([0, *(rows for rows, _ in groups)], device=device).cumsum(0).int(),
            lens=torch.tensor([pages * page_size for _, pages in groups], dtype=torch.int32, device=device),
            pages=lines,
            first_pages=torch.tensor(prefix_pages, dtype=torch.int32, device=device),
        )
        sinks = torch.randn(case.q.shape[1], device=device) if with_sinks else None
        pools = (case.k_pool, case.v_pool)
        alone = paged_attention(case.q, *pools, case.rows, 0.1, None, sinks, fixed_order=True)
        states = attend_to_prefixes(case.q, *pools, shared, 0.1, sinks)
        assert len(states.acc) == num_rows
        behind = case.rows._replace(prefix=states)
        together = paged_attention(case.q, *pools, behind, 0.1, None, sinks, fixed_order=True)
        for got, want in zip(together, alone, strict=True):
            assert torch.equal(got, want) if on_gpu else relative_error(got, want) < 5e-3
