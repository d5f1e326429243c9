"""An engine of plain numbers that shows any mistake in pages, lengths or sharing.

Each token's "KV" is a hash of the sequence up to it, stored in pages as a real engine would; each sampled token is a
hash over all KV that the page table leads to. A wrong page, a stale page or a token computed at the wrong place
changes the output, which `expected_output` computes from the sequence alone. A spoiler, where there is one, is a token
whose KV overflows, and with it that of all tokens that are computed in the same piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl_batch.batch import IntArray, ScheduledBatch
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.kvcache.naive import NaiveCache
from minisgl_batch.kvcache.radix import RadixCache
from minisgl_batch.messages import (
    FINISH_REASONS,
    AbortRequests,
    AddRequests,
    NewPrompt,
    NewRequest,
    RequestsRefused,
    Shutdown,
    StepOutput,
)
from minisgl_batch.scheduler.config import SchedulerConfig
from minisgl_batch.scheduler.scheduler import Scheduler
from minisgl_batch.scheduler.source import LocalSource

VOCAB = 50
EOS = 7
OVERFLOWED = -1  # as KV and as a sampled token


def _chain(previous: int, token: int) -> int:
    return abs(hash((previous, token, 0x6B76)))  # of integers alone: the same in every process


def _sample(kv: list[int]) -> int:
    return OVERFLOWED if OVERFLOWED in kv else hash(tuple(kv)) % VOCAB


def expected_output(
    prompt: list[int], max_tokens: int, ignore_eos: bool, max_seq_len: int, spoiler: int | None = None
) -> tuple[list[int], str]:
    """What greedy generation must give, and how it ends."""
    if spoiler in prompt:
        return [], "overflow"
    ids, kv = list(prompt), []
    for token in ids:
        kv.append(_chain(kv[-1] if kv else 0, token))
    output: list[int] = []
    while True:
        output.append(_sample(kv))
        kv.append(_chain(kv[-1], output[-1]))
        if output[-1] == EOS and not ignore_eos:
            return output, "stop"
        if len(output) == max_tokens or len(prompt) + len(output) == max_seq_len:
            return output, "length"
        if output[-1] == spoiler:
            return output, "overflow"


@dataclass
class FakeStep:
    result: IntArray

    def tokens(self) -> IntArray:
        return self.result


class FakeEngine:
    def __init__(self, config: SchedulerConfig, spoiler: int | None = None) -> None:
        self._spoiler = spoiler
        size, rows = config.page_size, config.max_running + 1
        self.page_size = size
        self.page_table = np.full((rows, -(-config.max_seq_len // size)), config.num_pages)
        self.token_pool = np.full((rows, config.max_seq_len + 1), -1)
        self.kv = np.zeros((config.num_pages + 1, size), dtype=np.int64)
        self.steps: list[ScheduledBatch] = []

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        self.steps.append(batch)
        self.page_table.reshape(-1)[batch.edits.page_index] = batch.edits.pages
        self.token_pool.reshape(-1)[batch.edits.token_index] = batch.edits.tokens
        # All rows write their KV before any row reads, as a layer does.
        rows = list(zip(batch.slots.tolist(), batch.q_lens.tolist(), batch.kv_lens.tolist(), strict=True))
        for (slot, _, kv_len), page in zip(rows, batch.new_pages.tolist(), strict=False):
            if page >= 0:
                self.page_table[slot, (kv_len - 1) // self.page_size] = page
        for slot, q_len, kv_len in rows:
            overflows = self._spoiler in self.token_pool[slot, kv_len - q_len : kv_len]
            for position in range(kv_len - q_len, kv_len):
                previous = self._kv(slot, position - 1) if position else 0
                page = self.page_table[slot, position // self.page_size]
                kv = OVERFLOWED if overflows else _chain(previous, max(0, int(self.token_pool[slot, position])))
                self.kv[page, position % self.page_size] = kv
        sampled = []
        prefixes = self._shared_prefixes(batch)
        for i, ((slot, _, kv_len), samples) in enumerate(zip(rows, batch.samples.tolist(), strict=True)):
            if samples:
                prefix = prefixes.get(i, [])
                assert len(prefix) < kv_len
                token = _sample(prefix + [self._kv(slot, position) for position in range(len(prefix), kv_len)])
                self.token_pool[slot, kv_len] = token
                sampled.append(token)
        return FakeStep(np.array(sampled, dtype=np.int32))

    def _shared_prefixes(self, batch: ScheduledBatch) -> dict[int, list[int]]:
        """Row -> KV of the pages that its group reads for it."""
        prefixes: dict[int, list[int]] = {}
        if batch.shared is not None:
            shared, row, page = batch.shared, 0, 0
            for num_rows, num_pages in zip(shared.num_rows.tolist(), shared.num_pages.tolist(), strict=True):
                kv = self.kv[shared.pages[page : page + num_pages]].reshape(-1).tolist()
                prefixes.update(dict.fromkeys(range(row, row + num_rows), kv))
                row, page = row + num_rows, page + num_pages
            assert row <= batch.num_decode
            assert page == len(shared.pages)
        return prefixes

    def _kv(self, slot: int, position: int) -> int:
        return int(self.kv[self.page_table[slot, position // self.page_size], position % self.page_size])


class Harness:
    """A scheduler over the fake engine, with what it has answered so far."""

    def __init__(self, *, cache: str = "radix", spoiler: int | None = None, **config: object) -> None:
        values: dict[str, object] = {
            "num_pages": 64,
            "page_size": 4,
            "max_running": 4,
            "max_seq_len": 64,
            "max_prefill_tokens": 16,
            "overlap": False,
        } | config
        self.config = SchedulerConfig(**values)  # type: ignore[arg-type]
        self.spoiler = spoiler
        self.engine = FakeEngine(self.config, spoiler)
        self.source = LocalSource()
        self.prefix_cache = {"radix": RadixCache, "naive": NaiveCache}[cache](self.config.page_size)
        self.scheduler = Scheduler(self.config, self.engine, self.prefix_cache, self.source)
        self._loop = self.scheduler.loop()
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.refused: dict[int, str] = {}
        self._requests: dict[int, tuple[list[int], EngineSampling]] = {}

    def add(self, prompt: list[int], max_tokens: int = 8, ignore_eos: bool = False) -> int:
        uid = len(self._requests)
        sampling = EngineSampling(max_tokens=max_tokens, stop_ids=() if ignore_eos else (EOS,))
        self._requests[uid] = (prompt, sampling)
        self.outputs[uid] = []
        new = NewPrompt(np.array(prompt, np.int32).tobytes(), sampling, [NewRequest(uid)])
        self.source.inbox.append(AddRequests([new]))
        return uid

    def abort(self, *uids: int) -> None:
        self.source.inbox.append(AbortRequests(list(uids)))

    @property
    def pending(self) -> set[int]:
        return set(self._requests) - set(self.finished) - set(self.refused)

    def tick(self) -> None:
        next(self._loop)
        self._collect()
        self.check_pages()

    def run(self, max_ticks: int = 5000) -> None:
        """Tick until every request is answered, then once more where a step is still in flight."""
        for _ in range(max_ticks):
            if not self.pending:
                break
            self.tick()
        assert not self.pending, f"requests {self.pending} never ended"
        while self.scheduler._reqs:
            self.tick()

    def stop(self) -> None:
        self.source.inbox.append(Shutdown())
        assert next(self._loop, "stopped") == "stopped"

    def _collect(self) -> None:
        while self.source.outbox:
            message = self.source.outbox.popleft()
            if isinstance(message, RequestsRefused):
                self.refused.update(dict(message.refused))
                continue
            assert isinstance(message, StepOutput)
            self.cached.update(dict(zip(message.first_uids, message.first_cached, strict=True)))
            uids = np.frombuffer(message.uids, np.int64).tolist()
            tokens = np.frombuffer(message.tokens, np.int32).tolist()
            finish = np.frombuffer(message.finish, np.uint8).tolist()
            assert len(set(uids)) == len(uids)
            for uid, token, how in zip(uids, tokens, finish, strict=True):
                assert uid not in self.finished, f"request {uid} got a token after its end"
                if token >= 0:
                    self.outputs[uid].append(token)
                if how:
                    self.finished[uid] = FINISH_REASONS[how]

    def check_pages(self) -> None:
        """Every page is in exactly one place."""
        table, cache = self.scheduler.table, self.scheduler.cache
        own = []
        for req in table.reqs:
            if req is not None:
                assert req.prefix is not None
                first = req.prefix.num_tokens // self.config.page_size
                own.extend(table.page_table[req.slot, first : table.num_row_pages(req.slot)].tolist())
        counts = cache.page_counts()
        assert sum(counts.values()) + len(own) == self.config.num_pages
        free = cache.free_pages().tolist()
        cached = self.prefix_cache.pages().tolist() if isinstance(self.prefix_cache, RadixCache) else []
        assert sorted(free + cached + own) == list(range(self.config.num_pages))
        assert not self.prefix_cache.check_integrity()

    def expected(self, uid: int) -> tuple[list[int], str]:
        prompt, sampling = self._requests[uid]
        ignore_eos, max_seq_len = not sampling.stop_ids, self.config.max_seq_len
        return expected_output(prompt, sampling.max_tokens, ignore_eos, max_seq_len, self.spoiler)

    def check_outputs(self) -> None:
        """Every answer is the expected one; an aborted or refused request's is the beginning of it."""
        for uid, how in (self.finished | dict.fromkeys(self.refused, "refused")).items():
            want, want_reason = self.expected(uid)
            if how in ("abort", "refused"):
                assert self.outputs[uid] == want[: len(self.outputs[uid])]
            else:
                assert (self.outputs[uid], how) == (want, want_reason), f"request {uid}"
