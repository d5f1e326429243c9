"""The scheduler: continuous batching over one engine.

Each tick it takes messages, decides a step, has the engine launch it, and turns the tokens of a finished step into
messages. `normal_loop` does so one step at a time; `overlap_loop` decides and launches step N+1 before it looks at the
tokens of step N, so that the device never waits for the host. Every decision follows from the messages and from
logical order alone, so ranks that get the same messages decide the same. It knows no tokenizer, no tensor and no
Redis.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from minisgl_batch.batch import BoolArray, IntArray, ScheduledBatch
from minisgl_batch.kvcache.base import PrefixCache
from minisgl_batch.messages import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    NOT_FINISHED,
    AbortRequests,
    AddRequests,
    DropCache,
    EngineStats,
    NewPrompt,
    NewRequest,
    RequestsRefused,
    Scores,
    Shutdown,
    StepOutput,
    ToEngine,
)
from minisgl_batch.request import Req, ReqState
from minisgl_batch.scheduler import overflow, scoring
from minisgl_batch.scheduler.cache import CacheManager
from minisgl_batch.scheduler.config import SchedulerConfig
from minisgl_batch.scheduler.constraints import FAILED, Constraints
from minisgl_batch.scheduler.decode import NO_ROWS, DecodeManager, DecodeRows
from minisgl_batch.scheduler.prefill import Piece, PrefillManager
from minisgl_batch.scheduler.sharing import PrefixSharing
from minisgl_batch.scheduler.source import MessageSource
from minisgl_batch.scheduler.steps import InFlight, StepRunner
from minisgl_batch.scheduler.table import TableManager

logger = logging.getLogger(__name__)


class Scheduler:
    """See the module's docstring."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: StepRunner,
        prefix_cache: PrefixCache,
        source: MessageSource,
        constraints: Constraints | None = None,
    ) -> None:
        """`constraints`: which a source that compiles grammars fills, at rank 0."""
        self.config = config
        self._engine = engine
        self._source = source
        self._constraints = constraints or Constraints()
        self.table = TableManager(config.max_running, config.max_seq_len, config.page_size, config.num_pages)
        self.cache = CacheManager(config.num_pages, prefix_cache, self.table)
        self.decode = DecodeManager(self.table, self.cache, PrefixSharing(self.table, prefix_cache, config.sharing))
        self.prefill = PrefillManager(self.table, self.cache, self.decode)
        self._reqs: dict[int, Req] = {}
        self._in_flight: InFlight | None = None
        self._stopped = self._has_run = False  # the latter: since the books were checked
        self._num_arrivals = 0
        self._aborted: list[int] = []
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._num_steps = self._num_retractions = 0

    # ----------------------------------------------------------------- loops

    def run(self) -> None:
        """Serve until a Shutdown message."""
        for _ in self.loop():
            pass

    def loop(self) -> Iterator[None]:
        """The loop that the config asks for; yields after each tick."""
        return self.overlap_loop() if self.config.overlap else self.normal_loop()

    def normal_loop(self) -> Iterator[None]:
        while self._receive():
            batch = self._schedule()
            if batch is not None:
                launched = self._launch(batch)
                self._constrain(launched)
                self._process(launched)
            self._report_aborts()
            yield

    def overlap_loop(self) -> Iterator[None]:
        while self._receive():
            batch = self._schedule()
            previous, self._in_flight = self._in_flight, None if batch is None else self._launch(batch)
            if previous is not None:
                self._process(previous)
            if self._in_flight is not None:
                self._constrain(self._in_flight)
            self._report_aborts()
            yield

    # -------------------------------------------------------------- messages

    def _receive(self) -> bool:
        """Take what has come, waiting only when there is nothing else to do. False once told to stop."""
        idle = not self._reqs and self._in_flight is None
        if idle and self._has_run:
            self._check_integrity()
            self._has_run = False
        for message in self._source.receive(block=idle):
            self._handle(message)
        return not self._stopped

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequests():
                refused = [
                    (new.uid, problem)
                    for prompt in message.prompts
                    for new in prompt.requests
                    if (problem := self._add(prompt, new))
                ]
                if refused:
                    self._constraints.forget(uid for uid, _ in refused)
                    self._source.send(RequestsRefused(refused))
            case AbortRequests():
                for uid in message.uids:
                    self._abort(uid)
            case DropCache():
                if not self._reqs and self._in_flight is None:
                    self.cache.reset()
            case Shutdown():
                self._stopped = True

    def _add(self, prompt: NewPrompt, new: NewRequest) -> str | None:
        """Put a request on the waiting list, or say why it can't be served."""
        ids = prompt_ids = np.frombuffer(prompt.prompt_ids, dtype=np.int32)
        if new.ending:
            ids = np.concatenate([prompt_ids, np.frombuffer(new.ending, dtype=np.int32)])
        if not 0 < len(ids) < self.config.max_seq_len:
            return f"the prompt has {len(ids)} tokens; this engine serves 1 to {self.config.max_seq_len - 1}"
        if new.uid in self._reqs:
            return f"request {new.uid} is already here"
        sampling = prompt.sampling_of(new)
        max_len = min(len(ids) + sampling.max_tokens, self.config.max_seq_len)
        first_scored = len(prompt_ids) if new.ending else 1
        is_constrained = prompt.constraint is not None
        req = Req(new.uid, ids, sampling, max_len, self._num_arrivals, first_scored, is_constrained)
        self._num_arrivals += 1
        self._reqs[new.uid] = req
        self.prefill.add(req)
        return None

    def _abort(self, uid: int) -> None:
        req = self._reqs.get(uid)
        if req is None or req.state is ReqState.DRAINING:
            return
        self._aborted.append(uid)
        if req.state is ReqState.WAITING:
            self._forget(req)
        else:
            self._drain(req)

    # -------------------------------------------------------------- schedule

    def _schedule(self) -> ScheduledBatch | None:
        """Decide the next step; None when nothing can run before the step in flight is done."""
        if not self.config.mixed and self.prefill.is_worthwhile(self._num_steps):
            pieces = self.prefill.schedule(self.config.max_prefill_tokens, self._num_steps)
            if pieces:
                return self._make_batch(NO_ROWS, pieces)
        while (rows := self.decode.schedule()) is None:
            if self._in_flight is not None:
                return None  # the tokens of a row must be known before it can be retracted
            self._retract(self.decode.victim())
        pieces = self.prefill.schedule(self.config.max_prefill_tokens, self._num_steps) if self.config.mixed else []
        if not len(rows.slots) and not pieces:
            return None
        return self._make_batch(rows, pieces)

    def _make_batch(self, rows: DecodeRows, pieces: list[Piece]) -> ScheduledBatch:
        table, num_decode = self.table, len(rows.slots)
        slots = np.concatenate([rows.slots, np.array([piece.req.slot for piece in pieces], dtype=np.int32)])
        q_lens = np.ones(len(slots), dtype=np.int32)
        q_lens[num_decode:] = [piece.num_tokens for piece in pieces]
        kv_lens = table.cached_len[slots] + q_lens
        samples: BoolArray = kv_lens >= table.prompt_end[slots]
        sampling_slots = slots[samples]
        constrained = np.flatnonzero(table.constrained[sampling_slots]).astype(np.int32)
        return ScheduledBatch(
            slots=slots,
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_decode=num_decode,
            new_pages=rows.new_pages,
            samples=samples,
            any_filter=bool(table.filtered[sampling_slots].any()),
            edits=table.take_edits(),
            shared=rows.shared,
            any_adjust=bool((kv_lens[samples] < table.adjust_end[sampling_slots]).any()),
            scoring=scoring.plan(table, slots, q_lens, kv_lens, samples),
            constrained=constrained if len(constrained) else None,
        )

    def _launch(self, batch: ScheduledBatch) -> InFlight:
        """Start a step and move its rows on, as if it were done: later steps run after it."""
        self._has_run = True
        launched = InFlight(batch, self._engine.launch(batch))
        table = self.table
        table.in_flight[batch.slots] += 1
        table.cached_len[batch.slots] = batch.kv_lens
        table.device_len[batch.slots] = np.maximum(table.prompt_end[batch.slots], batch.kv_lens + batch.samples)
        for slot in batch.slots[batch.num_decode :].tolist():
            req = table.reqs[slot]
            assert req is not None
            self.cache.cache_row(req)  # at once, so that waiting rows share a long prefix early
        self._num_steps += 1
        return launched

    def _constrain(self, launched: InFlight) -> None:
        """Let a step with constrained rows sample, now that the tokens of the step before it are known.

        The device runs the model meanwhile. Rows that have ended by those tokens get some mask.
        """
        batch = launched.batch
        if batch.constrained is None:
            return
        slots = batch.slots[batch.samples][batch.constrained]
        uids = np.where(self.table.running[slots], self.table.uid[slots], -1).tolist()
        launched.step.constrain(lambda masks: self._constraints.fill(uids, masks))
        if failures := self._constraints.take_failures():
            self._source.send(RequestsRefused(failures, FAILED))  # each ends with its next token

    # --------------------------------------------------------------- results

    def _process(self, done: InFlight) -> None:
        """Take the tokens of a step, end rows that are at their end, and report."""
        table, batch = self.table, done.batch
        tokens = done.step.tokens()
        table.in_flight[batch.slots] -= 1
        slots, positions = batch.slots[batch.samples], batch.kv_lens[batch.samples]
        table.tokens[slots, positions] = tokens

        if batch.scoring is not None:
            self._fail(found := scoring.overflowed(batch, done.step.scores()), np.zeros_like(found))
        if (missing := tokens < 0).any():
            self._fail(slots[missing], positions[missing])
        alive = table.running[slots]
        slots, positions, tokens = slots[alive], positions[alive], tokens[alive]
        finish = np.full(len(slots), NOT_FINISHED, dtype=np.uint8)
        finish[positions + 1 >= table.max_len[slots]] = FINISH_LENGTH
        finish[(tokens[:, None] == table.stop_ids[slots]).any(axis=1)] = FINISH_STOP
        if batch.constrained is not None:
            going = table.constrained[slots] & (finish == NOT_FINISHED)
            self._constraints.advance(table.uid[slots[going]].tolist(), tokens[going].tolist())
        scores = None if batch.scoring is None else scoring.scores(table, batch, done.step.scores())
        if len(slots) or scores is not None:
            self._report(slots, positions, tokens, finish, scores)
        for slot, position in zip(slots[finish > 0].tolist(), positions[finish > 0].tolist(), strict=True):
            req = self._req_at(slot)
            self.decode.estimate.finished(position + 1 - req.num_prompt, req.max_len - req.num_prompt)
            self._drain(req)
        self._release_drained(batch.slots)

    def _fail(self, slots: IntArray, positions: IntArray) -> None:
        """End the rows among these that still run: their logits for the tokens at `positions` aren't finite.

        Pages that others computed may hold what overflowed in the others' tokens: rows with such pages run once more,
        with none but their own.
        """
        failures = []
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            req = self.table.reqs[slot]
            if req is None:
                continue  # its prompt was enough
            self.cache.spoil_row(req)
            if req.state is not ReqState.RUNNING:
                continue
            if req.num_reused:
                req.ids = self.table.tokens[slot, : max(position, len(req.ids))].copy()
                self._drain(req, ReqState.RETURNING)
            else:
                failures.append((req.uid, overflow.reason(position + 1 - req.num_prompt, self.config.dtype)))
                self._drain(req)
        if failures:
            self._source.send(RequestsRefused(failures, overflow.OVERFLOWED))

    def _report(
        self,
        slots: IntArray,
        positions: IntArray,
        tokens: IntArray,
        finish: npt.NDArray[np.uint8],
        scores: Scores | None,
    ) -> None:
        table = self.table
        first = [self._req_at(slot) for slot in slots[positions == table.num_prompt[slots]].tolist()]
        first_cached = [req.num_cached for req in first]
        self._output_tokens += len(slots)
        self._prompt_tokens += sum(req.num_prompt for req in first)
        self._cached_tokens += sum(first_cached)
        self._source.send(
            StepOutput(
                uids=table.uid[slots].tobytes(),
                tokens=tokens.tobytes(),
                finish=finish.tobytes(),
                first_uids=[req.uid for req in first],
                first_cached=first_cached,
                stats=self.stats(),
                scores=scores,
            )
        )

    def _report_aborts(self) -> None:
        if not self._aborted:
            return
        uids, self._aborted = np.array(self._aborted, dtype=np.int64), []
        self._source.send(
            StepOutput(
                uids=uids.tobytes(),
                tokens=np.full(len(uids), -1, dtype=np.int32).tobytes(),
                finish=np.full(len(uids), FINISH_ABORT, dtype=np.uint8).tobytes(),
                first_uids=[],
                first_cached=[],
                stats=self.stats(),
            )
        )

    # ----------------------------------------------------------- ends of rows

    def _drain(self, req: Req, state: ReqState = ReqState.DRAINING) -> None:
        """Run the row no more; free it now, or when the step in flight that names it is done."""
        req.state = state
        self._stop_running(req)
        if not self.table.in_flight[req.slot]:
            self._free(req)

    def _release_drained(self, slots: IntArray) -> None:
        for slot in slots[~self.table.running[slots] & (self.table.in_flight[slots] == 0)].tolist():
            req = self.table.reqs[slot]
            if req is not None:
                self._free(req)

    def _free(self, req: Req) -> None:
        self._take_slot(req)
        if req.state is ReqState.RETURNING:
            req.is_alone = True
            self._wait_again(req)
        else:
            self._forget(req)

    def _retract(self, req: Req) -> None:
        """Put a running row back on the waiting list with the tokens it has. No step is in flight."""
        logger.debug("the KV pool is full: retracting %r", req)
        self._num_retractions += 1
        self.decode.estimate.retracted()
        self._stop_running(req)
        req.ids = self.table.tokens[req.slot, : self.table.device_len[req.slot]].copy()
        self._take_slot(req)
        self._wait_again(req)

    def _wait_again(self, req: Req) -> None:
        req.state = ReqState.WAITING
        self.prefill.requeue(req)

    def _stop_running(self, req: Req) -> None:
        self.table.running[req.slot] = False
        self.prefill.drop(req)

    def _take_slot(self, req: Req) -> None:
        self.cache.release_row(req)
        self.table.remove(req)

    def _forget(self, req: Req) -> None:
        req.state = ReqState.FREED
        self.prefill.drop(req)
        self._constraints.forget([req.uid])
        del self._reqs[req.uid]

    # ----------------------------------------------------------------- state

    def _req_at(self, slot: int) -> Req:
        req = self.table.reqs[slot]
        assert req is not None
        return req

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=self.prefill.num_waiting,
            num_running=self.table.num_used_slots,
            num_pages=self.cache.num_pages,
            num_free_pages=self.cache.num_available_pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            num_steps=self._num_steps,
            num_retractions=self._num_retractions,
        )

    def _check_integrity(self) -> None:
        """With nothing running every page must be free or cached. Wrong books cost cached prefixes, never the group."""
        problems = self.cache.check_integrity()
        if problems:
            logger.error("the KV pool's books are wrong, dropping the prefix cache: %s", "; ".join(problems))
            self.cache.reset()
