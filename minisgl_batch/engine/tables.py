"""The device's copies of the scheduler's tables: page table, token pool, and each slot's sampling values.

They change by `TableEdits` and by sampled tokens, both in the order of launched steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl_batch.batch import ForwardBatch, ScheduledBatch, TableEdits
from minisgl_kernels.gumbel import SamplingRows


class DeviceTables:
    """One line per slot; the last is the dummy row that padding stands on."""

    def __init__(
        self, max_running: int, max_seq_len: int, page_size: int, dummy_page: int, device: torch.device
    ) -> None:
        num_rows = max_running + 1
        max_pages = -(-max_seq_len // page_size)
        self._page_size = page_size
        self._device = device
        self.page_table = torch.full((num_rows, max_pages), dummy_page, dtype=torch.int32, device=device)
        self.token_pool = torch.zeros((num_rows, max_seq_len + 1), dtype=torch.int32, device=device)
        self._temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._sample_index = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_prompt = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def apply(self, edits: TableEdits) -> None:
        if len(edits.page_index):
            self.page_table.view(-1)[self._send(edits.page_index)] = self._send(edits.pages)
        if len(edits.token_index):
            self.token_pool.view(-1)[self._send(edits.token_index)] = self._send(edits.tokens)
        if edits.new_rows:
            slots = torch.tensor([slot for slot, _, _ in edits.new_rows], device=self._device)
            sampling = [values for _, values, _ in edits.new_rows]
            self._num_prompt[slots] = torch.tensor([n for _, _, n in edits.new_rows], device=self._device)
            for column, values in (
                (self._temperature, [0.0 if s.is_greedy else s.temperature for s in sampling]),
                (self._top_k, [s.top_k for s in sampling]),
                (self._top_p, [s.top_p for s in sampling]),
                (self._min_p, [s.min_p for s in sampling]),
                (self._seed, [s.seed for s in sampling]),
                (self._sample_index, [s.sample_index for s in sampling]),
            ):
                column[slots] = torch.tensor(values, dtype=column.dtype, device=self._device)

    def add_pages(self, host: ScheduledBatch) -> None:
        """Enter the pages that decode rows begin."""
        begins = host.new_pages >= 0
        if begins.any():
            rows, columns = host.slots[: host.num_decode][begins], (host.kv_lens[: host.num_decode][begins] - 1)
            where = (self._send(rows).long(), self._send(columns // self._page_size).long())
            self.page_table[where] = self._send(host.new_pages[begins])

    def forward_batch(self, host: ScheduledBatch) -> ForwardBatch:
        """The device's side of a step: token ids from the token pool, places from the page table."""
        if host.is_decode:
            slot_of_token, position = host.slots, host.kv_lens - 1
        else:
            slot_of_token = np.repeat(host.slots, host.q_lens)
            ends = np.cumsum(host.q_lens, dtype=np.int32)
            position = np.arange(ends[-1], dtype=np.int32) + np.repeat(host.kv_lens - ends, host.q_lens)
        slots, positions = self._send(slot_of_token).long(), self._send(position)
        pages = self.page_table[slots, positions // self._page_size]
        sample_tokens = np.cumsum(host.q_lens, dtype=np.int64)[host.samples] - 1
        return ForwardBatch(
            host=host,
            input_ids=self.token_pool[slots, positions],
            positions=positions,
            out_loc=pages * self._page_size + positions % self._page_size,
            slots=self._send(host.slots),
            page_table=self.page_table,
            sample_tokens=self._send(sample_tokens),
        )

    def sampling_rows(self, host: ScheduledBatch) -> SamplingRows:
        """What the sampler reads: the rows that sample, and every slot's values."""
        return SamplingRows(
            slots=self._send(host.slots[host.samples]),
            kv_lens=self._send(host.kv_lens[host.samples]),
            num_prompt=self._num_prompt,
            seeds=self._seed,
            sample_indices=self._sample_index,
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
        )

    def put_tokens(self, host: ScheduledBatch, tokens: torch.Tensor) -> None:
        """Write each sampled token behind its row's last one."""
        slots, positions = host.slots[host.samples], host.kv_lens[host.samples]
        self.token_pool[self._send(slots).long(), self._send(positions).long()] = tokens

    def _send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
