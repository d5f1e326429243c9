"""A decode step's inputs, against the twin and against a row-by-row account of what they are."""

from __future__ import annotations

import random

import pytest
import torch

from minisgl_kernels import reference
from minisgl_kernels.decode_inputs import DecodeInputs, PageLists, decode_inputs

POISON = -12345


@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "twin"])
@pytest.mark.parametrize("has_lists", [True, False])
def test_inputs_are_those_of_each_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, has_lists: bool, use_kernel: bool
) -> None:
    if not use_kernel:
        monkeypatch.setattr("minisgl_kernels.triton_support.runs_kernels", lambda _: False)
    real = device.type == "cuda"
    num_rows, max_pages = (1024, 2560) if real else (random.randrange(1, 9), random.randrange(1, 1200))
    page_size = random.choice((1, 16) if real else (1, 16, 64))
    num_lines = num_rows + 2
    table = torch.randint(0, 1 << 24, (num_lines, max_pages), dtype=torch.int32)
    tokens = torch.randint(0, 200000, (num_lines, max_pages * page_size + 1), dtype=torch.int32)
    tokens[torch.rand(tokens.shape) < 0.1] = -1  # of rows that fail
    slots = torch.randperm(num_lines)[:num_rows].int()
    kv_lens = torch.randint(1, max_pages * page_size + 1, (num_rows,), dtype=torch.int32)
    new_pages = torch.where(torch.rand(num_rows) < 0.5, torch.randint(0, 1 << 24, (num_rows,)), -1).int()
    last = (kv_lens - 1) // page_size
    first_pages = (torch.rand(num_rows) * (last + 1)).int()
    indptr = torch.cat((torch.zeros(1), (last + 1 - first_pages).cumsum(0))).int()

    def poison(n: int) -> torch.Tensor:
        return torch.full((n,), POISON, dtype=torch.int32, device=device)

    inputs = DecodeInputs(poison(num_rows), poison(num_rows), poison(num_rows))
    lists = PageLists(indptr.to(device), first_pages.to(device), poison(int(indptr[-1]) + 9), poison(num_rows))
    on_device = [x.to(device) for x in (slots, kv_lens, new_pages, table, tokens)]
    decode_inputs(*on_device, page_size, inputs, lists if has_lists else None)

    for i, slot in enumerate(slots.tolist()):
        if new_pages[i] >= 0:
            table[slot, last[i]] = new_pages[i]
    rows = slots.long()
    position = kv_lens.long() - 1
    assert torch.equal(on_device[3].cpu(), table)
    assert torch.equal(inputs.input_ids.cpu(), tokens[rows, position].clamp_min(0))
    assert torch.equal(inputs.positions.cpu(), position.int())
    assert torch.equal(inputs.out_loc.cpu(), table[rows, last.long()] * page_size + position.int() % page_size)
    if has_lists:
        assert torch.equal(lists.last_page_lens.cpu(), position.int() % page_size + 1)
        pages = [table[slot, a : b + 1] for slot, a, b in zip(rows, first_pages, last, strict=True)]
        assert torch.equal(lists.indices.cpu(), torch.cat((*pages, poison(9).cpu())))
    else:
        assert (lists.indices == POISON).all()


def test_padding_rows_share_the_dummy(device: torch.device) -> None:
    """Rows of the dummy slot change nothing, however many there are."""
    table = torch.tensor([[3, 9], [7, 7]], dtype=torch.int32, device=device)
    before = table.clone()
    slots = torch.ones(5, dtype=torch.int32, device=device)
    inputs = DecodeInputs(*torch.zeros(3, 5, dtype=torch.int32, device=device))
    tokens = torch.zeros(2, 9, dtype=torch.int32, device=device)
    decode_inputs(slots, slots, -slots, table, tokens, 4, inputs)
    assert torch.equal(table, before)
    assert inputs.out_loc.tolist() == [28] * 5


def test_the_twin_needs_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    reference.decode_inputs(none, none, none, table, table, 4, none, none, none, None)
