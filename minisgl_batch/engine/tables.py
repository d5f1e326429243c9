"""The device's copies of the scheduler's tables: page table, token pool, and each slot's sampling values.

They change by `TableEdits`, by the pages that decode rows begin and by sampled tokens, all in the order of launched
steps. Called by the engine.
"""

from __future__ import annotations

import numpy as np
import torch

from minisgl_batch.batch import ForwardBatch, IntArray, ScheduledBatch, TableEdits
from minisgl_batch.engine.transfer import Transfer
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.sampling_params import MAX_LOGIT_RULES
from minisgl_kernels.adjust_logits import AdjustedRows
from minisgl_kernels.gumbel import SamplingRows

MAX_UPLOAD = 1 << 18  # values of one upload of edits; there are more when rows with long texts start together
_NUM_VALUES = 13  # per new row, see _row_values
_RULE_WIDTH = 4  # words of a rule, see AdjustedRows


class DeviceTables:
    """One line per slot; the last is the dummy row that padding stands on."""

    def __init__(
        self,
        max_running: int,
        max_seq_len: int,
        page_size: int,
        dummy_page: int,
        device: torch.device,
        transfer: Transfer,
    ) -> None:
        num_rows = max_running + 1
        max_pages = -(-max_seq_len // page_size)
        self._page_size = page_size
        self._transfer = transfer
        self.page_table = torch.full((num_rows, max_pages), dummy_page, dtype=torch.int32, device=device)
        self.token_pool = torch.zeros((num_rows, max_seq_len + 1), dtype=torch.int32, device=device)
        self._temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._sample_index = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_prompt = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._presence = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._frequency = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._repetition = torch.ones(num_rows, dtype=torch.float32, device=device)
        self._num_rules = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._rules = torch.zeros((num_rows, MAX_LOGIT_RULES, _RULE_WIDTH), dtype=torch.int32, device=device)

    @staticmethod
    def row_bytes(max_seq_len: int, page_size: int) -> int:
        """Bytes of a slot, but for a few numbers."""
        return 4 * (-(-max_seq_len // page_size) + max_seq_len + 1 + MAX_LOGIT_RULES * _RULE_WIDTH)

    def apply(self, edits: TableEdits) -> None:
        """Make the scheduler's changes since the last step."""
        if not (len(edits.page_index) or len(edits.token_index) or edits.new_rows):
            return
        values = np.concatenate([_row_values(*row) for row in edits.new_rows]) if edits.new_rows else _NOTHING
        pages, tokens = (edits.page_index, edits.pages), (edits.token_index, edits.tokens)
        if 2 * (len(edits.pages) + len(edits.tokens)) + len(values) > MAX_UPLOAD:
            self._write(self.page_table, *pages)
            self._write(self.token_pool, *tokens)
            pages = tokens = (_NOTHING, _NOTHING)
        page_index, new_pages, token_index, new_tokens, new_rows = self._transfer.upload([*pages, *tokens, values])
        self.page_table.view(-1)[page_index.long()] = new_pages
        self.token_pool.view(-1)[token_index.long()] = new_tokens
        self._set_sampling(new_rows.view(-1, _NUM_VALUES))
        rules = [(slot, _rules(sampling)) for slot, sampling, _ in edits.new_rows if sampling.num_rules]
        if rules:
            width = self._rules[0].numel()
            index = [slot * width + np.arange(len(words), dtype=np.int32) for slot, words in rules]
            self._write(self._rules, np.concatenate(index), np.concatenate([words for _, words in rules]))

    def _write(self, table: torch.Tensor, index: IntArray, values: IntArray) -> None:
        """Write to flat positions of a table, in uploads of which each fits."""
        num_values = MAX_UPLOAD // 2
        for start in range(0, len(index), num_values):
            part = slice(start, start + num_values)
            places, new = self._transfer.upload([index[part], values[part]])
            table.view(-1)[places.long()] = new

    def _set_sampling(self, rows: torch.Tensor) -> None:
        slots = rows[:, 0].long()
        self._num_prompt[slots] = rows[:, 1].long()
        self._sample_index[slots] = rows[:, 2].long()
        self._top_k[slots] = rows[:, 3]
        self._temperature[slots] = rows[:, 4].view(torch.float32)
        self._top_p[slots] = rows[:, 5].view(torch.float32)
        self._min_p[slots] = rows[:, 6].view(torch.float32)
        self._presence[slots] = rows[:, 7].view(torch.float32)
        self._frequency[slots] = rows[:, 8].view(torch.float32)
        self._repetition[slots] = rows[:, 9].view(torch.float32)
        self._num_rules[slots] = rows[:, 10]
        self._seed[slots] = rows[:, 12].long() << 32 | rows[:, 11].long() & 0xFFFFFFFF

    def forward_batch(self, host: ScheduledBatch) -> ForwardBatch:
        """The device's side of a step: token ids from the token pool, places from the page table."""
        row_of_token = np.repeat(np.arange(host.num_rows, dtype=np.int32), host.q_lens)
        ends = np.cumsum(host.q_lens, dtype=np.int32)
        position = np.arange(ends[-1], dtype=np.int32) + (host.kv_lens - ends)[row_of_token]
        begins = host.new_pages >= 0
        scored = _scored_tokens(host, ends)
        uploads = [
            host.slots[row_of_token],
            position,
            host.slots,
            host.kv_lens,
            np.append(np.int32(0), ends),
            np.concatenate([ends[host.samples] - 1, scored]),
            np.flatnonzero(begins).astype(np.int32),
            host.new_pages[begins],
        ]
        token_slots, positions, slots, kv_lens, q_starts, sample_tokens, rows, pages = self._transfer.upload(uploads)
        if len(pages):
            rows = rows.long()
            self.page_table[slots[rows].long(), positions[rows].long() // self._page_size] = pages
        lines, columns = token_slots.long(), positions.long()
        page_of_token = self.page_table[lines, columns // self._page_size]
        return ForwardBatch(
            host=host,
            input_ids=self.token_pool[lines, columns].clamp_min_(0),  # -1: the row will fail, its token wasn't seen yet
            positions=positions,
            out_loc=page_of_token * self._page_size + positions % self._page_size,
            slots=slots,
            kv_lens=kv_lens,
            q_starts=q_starts,
            page_table=self.page_table,
            token_pool=self.token_pool,
            sample_tokens=None if host.is_decode else sample_tokens,
            targets=self._behind(token_slots, positions, sample_tokens[len(sample_tokens) - len(scored) :]),
        )

    def _behind(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens behind some of a step's tokens, all int32."""
        index = tokens.long()
        return self.token_pool[slots[index].long(), positions[index].long() + 1]

    def sampling_rows(self, slots: torch.Tensor, kv_lens: torch.Tensor) -> SamplingRows:
        """What the sampler reads: the rows that sample, (num_samples,) int32 both, and every slot's values."""
        return SamplingRows(
            slots=slots,
            kv_lens=kv_lens,
            num_prompt=self._num_prompt,
            seeds=self._seed,
            sample_indices=self._sample_index,
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
        )

    def adjusted_rows(self, slots: torch.Tensor, kv_lens: torch.Tensor) -> AdjustedRows:
        """By what the sampler changes logits; arguments as `sampling_rows`."""
        return AdjustedRows(
            slots=slots,
            kv_lens=kv_lens,
            num_prompt=self._num_prompt,
            token_pool=self.token_pool,
            presence=self._presence,
            frequency=self._frequency,
            repetition=self._repetition,
            num_rules=self._num_rules,
            rules=self._rules,
        )

    def put_tokens(self, slots: torch.Tensor, kv_lens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write each sampled token behind its row's last one; all (num_samples,) int32."""
        self.token_pool[slots.long(), kv_lens.long()] = tokens


_NOTHING: IntArray = np.empty(0, dtype=np.int32)


def _scored_tokens(host: ScheduledBatch, ends: IntArray) -> IntArray:
    """Which of a step's tokens score the prompt's token behind them; rows end at `ends` in the step."""
    if host.scoring is None:
        return _NOTHING
    starts = (ends - host.q_lens)[host.scoring.rows] + host.scoring.firsts
    pairs = zip(starts.tolist(), host.scoring.counts.tolist(), strict=True)
    return np.concatenate([_NOTHING, *(np.arange(start, start + count, dtype=np.int32) for start, count in pairs)])


def _row_values(slot: int, sampling: EngineSampling, num_prompt: int) -> IntArray:
    """A new row as int32 words: its slot, whole numbers, float32 bits, and the two halves of the seed."""
    temperature = 0.0 if sampling.is_greedy else sampling.temperature
    whole = np.array([slot, num_prompt, sampling.sample_index, sampling.top_k], dtype=np.int32)
    penalties = [sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty]
    floats = np.array([temperature, sampling.top_p, sampling.min_p, *penalties], dtype=np.float32)
    num_rules = np.array([sampling.num_rules], dtype=np.int32)
    seed = np.array([sampling.seed], dtype=np.int64)
    return np.concatenate([whole, floats.view(np.int32), num_rules, seed.view(np.int32)])


def _rules(sampling: EngineSampling) -> IntArray:
    """(num_rules * 4,) int32: a row's rules as `AdjustedRows` has them."""
    always = np.iinfo(np.int32).max
    rules = [(token, bias, always, 1) for token, bias in sampling.logit_bias]
    if sampling.min_tokens:
        rules += [(token, -np.inf, sampling.min_tokens, 1) for token in sampling.stop_ids]
    for word in sampling.bad_words:
        rules += [(token, 0.0, 0, 0) for token in word[:-1]]
        rules.append((word[-1], -np.inf, always, len(word)))
    tokens, values, ends, lengths = zip(*rules, strict=True)
    bits = np.array(values, dtype=np.float32).view(np.int32)
    return np.stack(
        [np.array(tokens, np.int32), bits, np.array(ends, np.int32), np.array(lengths, np.int32)], 1
    ).ravel()
