"""The frontend of a worker group: chunks from Redis to the engine, tokens from the engine to readers and Parquet.

One loop does it all, a little of each in turn: nothing in it waits, except for the engine while rows run and for Redis
while none do. `delivery` keeps the chunks, `publishing` the readers; this module joins them to the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import msgspec

from minisgl_batch._version import __version__
from minisgl_batch.child_process import StatusPipe, run_child
from minisgl_batch.errors import RequestError
from minisgl_batch.hub import fingerprint, model_path
from minisgl_batch.messages import (
    AbortRequests,
    AddRequests,
    EngineStats,
    FromEngine,
    NewPrompt,
    Ready,
    RequestsRefused,
    Shutdown,
    StepOutput,
)
from minisgl_batch.tokenizer import (
    ModelTokenizer,
    OutputEvents,
    OutputProcessor,
    ResolvedRequest,
    hide_torch,
    resolve_requests,
)
from minisgl_jobs.dataset import DEFAULT_SAMPLING
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.model import EngineInfo, Row
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.roots import AllowedRoots
from minisgl_jobs.status import WorkerInfo
from minisgl_jobs.streams import TokenPublisher
from minisgl_jobs.tasks import task_queue
from minisgl_workers.delivery import Delivery
from minisgl_workers.lease_keeper import LeaseKeeper
from minisgl_workers.links import FrontendSide
from minisgl_workers.options import FrontendConfig
from minisgl_workers.publishing import Publishing, RunningSample
from minisgl_workers.reconnect import connect_patiently
from minisgl_workers.socket_directory import remove_socket_directory
from minisgl_workers.work import ChunkWork

logger = logging.getLogger(__name__)

TICK_S = 0.01  # between rounds of duties in Redis; what happens within one is sent together
PREPARE_S = 0.05  # at a time: rows whose grammars have to be read first may take a fraction of a second each


@dataclass(slots=True)
class _Rate:
    """Output tokens per second over the last few seconds."""

    tokens: int = 0
    since: float = 0.0
    per_s: float = 0.0

    def update(self, output_tokens: int) -> None:
        now = time.monotonic()
        if now - self.since >= 2.0:
            self.per_s = (output_tokens - self.tokens) / (now - self.since) if self.since else 0.0
            self.tokens, self.since = output_tokens, now


@dataclass(slots=True)
class _BegunPart:
    """Rows on their way to the engine.

    Attributes:
        requests: those that are yet to be sent, each made when it is asked for.
    """

    work: ChunkWork
    requests: Iterator[tuple[Row, ResolvedRequest | RequestError]]


class Frontend:
    """See the module's docstring.

    Attributes:
        num_rounds: of the loop, which never rests for longer than a call of Redis takes.
        suspects: a chunk that has killed workers runs, alone.
    """

    def __init__(
        self,
        delivery: Delivery,
        publishing: Publishing,
        link: FrontendSide,
        tokenizer: ModelTokenizer,
        info: WorkerInfo,
        status: StatusPipe,
    ) -> None:
        self.num_rounds = 0
        self.suspects = False
        self._has_delivered = False
        self._status = status
        self._delivery = delivery
        self._publishing = publishing
        self._link = link
        self._tokenizer = tokenizer
        self._info = info
        self._outputs = OutputProcessor(tokenizer.detokenizer)
        self._begun: list[_BegunPart] = []
        self._running: dict[int, RunningSample] = {}
        self._stats = EngineStats()
        self._rate = _Rate()
        self._next_uid = 0
        self._has_sent_vocabulary = False
        self._drain_until: float | None = None
        self._next_exchange = 0.0

    def drain(self, drain_s: float) -> None:
        """Take no more chunks; let what runs finish for `drain_s`, then hand it back. Ends `run`."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + drain_s

    def run(self, max_seq_len: int) -> None:
        """Serve until drained."""
        self._max_seq_len = max_seq_len
        while not self._is_drained():
            self.num_rounds += 1
            self._exchange_with_redis()
            self._begin_parts()
            self._send_rows()
            if self._delivery.works:
                self._take_output(self._link.receive(TICK_S))
            elif self._drain_until is None:
                self._delivery.wait_for_work()
                self._next_exchange = 0.0  # the bell that ended the wait doesn't ring twice
        self._stop_samples(list(self._running.values()))
        self._delivery.hand_back()
        self._link.send(Shutdown())

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        return not self._delivery.works or time.monotonic() >= self._drain_until

    # -------------------------------------------------------- towards Redis

    def _exchange_with_redis(self) -> None:
        now = time.monotonic()
        if now < self._next_exchange:
            return
        self._next_exchange = now + TICK_S
        self._delivery.tick(self._describe(), take=self._drain_until is None)
        for work in self._delivery.stopped:
            self._begun = [part for part in self._begun if part.work is not work]
            self._stop_samples([sample for sample in self._running.values() if sample.work is work])
        self._delivery.stopped.clear()
        if self._delivery.spooled and not self._has_delivered:
            self._has_delivered = True
            self._status.delivered()
        self._publishing.ends(self._delivery.spooled)
        self._delivery.spooled.clear()
        self._publishing.tick(self._delivery.works, self._running, self._outputs)

    def _describe(self) -> WorkerInfo:
        self._rate.update(self._stats.output_tokens)
        num_running = min(self._stats.num_running, len(self._running))  # the last step's may have finished
        return msgspec.structs.replace(
            self._info,
            tokens_per_s=self._rate.per_s if self._running else 0.0,
            num_running=num_running,
            num_waiting=len(self._running) - num_running,
            prompt_tokens=self._stats.prompt_tokens,
            cached_tokens=self._stats.cached_tokens,
            trouble=self._delivery.trouble,
        )

    # ------------------------------------------------------ towards the engine

    def _begin_parts(self) -> None:
        """Begin with what may run now: all rows of a chunk, or the next part of one that runs alone."""
        works = self._delivery.works
        suspects = len(works) == 1 and works[0].lease.is_solo
        if suspects != self.suspects:
            self.suspects = suspects
            self._status.suspects(suspects)
        for work in works:
            if work.lease.is_solo and len(works) > 1:
                continue
            part = work.next_part()
            if part is None or not self._delivery.holds(work):
                continue
            if not work.lease.is_solo or self._announce(work, part):
                self._begin_part(work, part)

    def _announce(self, work: ChunkWork, part: list[Row]) -> bool:
        return self._delivery.announce_part(work, range(part[0].row_index, part[-1].row_index + 1))

    def _begin_part(self, work: ChunkWork, part: list[Row]) -> None:
        work.start(part)
        spec = work.lease.spec
        requests = resolve_requests(
            self._tokenizer,
            [row.input for row in part],
            [row.params for row in part],
            [row.row_index for row in part],
            defaults=spec.params,
            max_len=self._max_seq_len,
            job_seed=spec.seed,
            system=spec.system,
        )
        self._begun.append(_BegunPart(work, zip(part, requests, strict=True)))

    def _send_rows(self) -> None:
        """Send the engine rows that were begun, for a moment: other duties are due. Parts take turns."""
        until = time.monotonic() + PREPARE_S
        for part in list(self._begun):
            self._begun.remove(part)
            if not self._send_some(part, until):
                self._begun.append(part)
            if time.monotonic() > until:
                return

    def _send_some(self, part: _BegunPart, until: float) -> bool:
        """Send rows of a part, at least one; those that can't be run fail. True once all are sent."""
        work, made, is_all = part.work, list[tuple[Row, ResolvedRequest]](), True
        for row, resolved in part.requests:
            if isinstance(resolved, RequestError):
                work.fail(row, resolved)
            else:
                made.append((row, resolved))
            if time.monotonic() > until:
                is_all = False
                break
        prompts, samples = self._prepare(work, made)
        if not prompts:
            return is_all
        if not self._delivery.holds(work):
            # This process was stopped for so long that others may have run these rows by now.
            self._forget(samples)
            part.requests = chain(made, part.requests)
            return False
        self._publishing.started(samples, self._outputs)
        if not self._has_sent_vocabulary and any(prompt.constraint is not None for prompt in prompts):
            self._link.send(self._tokenizer.vocabulary())
            self._has_sent_vocabulary = True
        self._link.send(AddRequests(prompts))
        return is_all

    def _prepare(
        self, work: ChunkWork, made: list[tuple[Row, ResolvedRequest]]
    ) -> tuple[list[NewPrompt], list[RunningSample]]:
        """What the engine is asked for rows, and their samples."""
        prompts, samples, started_at = list[NewPrompt](), list[RunningSample](), time.time()
        for row, resolved in made:
            missing = work.missing_samples(row)
            prompt = resolved.message(self._next_uid, missing)
            self._next_uid += len(prompt.requests)
            prompts.append(prompt)
            for uid, sample_index in zip(self._outputs.add_prompt(prompt, resolved), missing, strict=True):
                sample = RunningSample(uid, work, row, sample_index, resolved.sampling.seed, started_at)
                self._running[uid] = sample
                samples.append(sample)
        return prompts, samples

    def _stop_samples(self, samples: list[RunningSample]) -> None:
        """Give up samples whose results nobody wants any more."""
        if samples:
            self._link.send(AbortRequests(self._forget(samples)))

    def _forget(self, samples: list[RunningSample]) -> list[int]:
        """Expect nothing more of them; answers the uids of their requests."""
        for sample in samples:
            del self._running[sample.uid]
        return self._outputs.abort([sample.uid for sample in samples]).aborts

    # ------------------------------------------------------ from the engine

    def _take_output(self, messages: list[FromEngine]) -> None:
        for message in messages:
            match message:
                case StepOutput():
                    self._stats = message.stats
                    self._take_events(self._outputs.process(message, time.time()))
                case RequestsRefused():
                    self._take_events(self._outputs.refuse(message))
                case Ready():
                    raise RuntimeError("the engine started anew under a running frontend")

    def _take_events(self, events: OutputEvents) -> None:
        for delta in events.deltas:
            self._publishing.delta(self._running[delta.uid], delta, self._outputs)
        for output in events.finished:
            sample = self._running.pop(output.uid)
            text_of = self._tokenizer.token_text
            sample.work.finish(sample.row, sample.sample_index, sample.seed, sample.started_at, output, text_of)
        if events.aborts:
            self._link.send(AbortRequests(events.aborts))


def main(config: FrontendConfig, status: StatusPipe) -> None:
    hide_torch()
    options = config.options
    link = FrontendSide(Path(config.socket_directory))
    client = connect_patiently(options.redis_url)
    folder = model_path(options.engine.model, options.engine.revision)
    tokenizer, files = ModelTokenizer.load(folder), fingerprint(folder)
    ready = _wait_for_engine(link)
    engine: EngineInfo = {
        **ready.description,
        "model_fingerprint": files,
        DEFAULT_SAMPLING: dict(tokenizer.default_sampling.given),
        "minisgl_batch": __version__,
        "torch": version("torch"),
    }
    queue, kept = (
        ChunkQueue(client, options.model, config.worker_id, lease_s=options.lease_s, engine=engine) for _ in range(2)
    )
    keeper, name = LeaseKeeper(kept), queue.keys.queue
    delivery = Delivery(
        queue,
        keeper,
        Outbox(client, name),
        task_queue(client, name),
        low_water=2 * ready.max_running,
        roots=AllowedRoots(options.allow_roots),
        input_s=options.input_s,
    )
    info = WorkerInfo(
        worker_id=config.worker_id,
        model=options.model,
        host=socket.gethostname(),
        pid=os.getpid(),
        since=time.time(),
        description=engine,
        drops_tools=tokenizer.drops_tools,
    )
    publishing = Publishing(TokenPublisher(client, options.model))
    frontend = Frontend(delivery, publishing, link, tokenizer, info, status)
    signal.signal(signal.SIGTERM, lambda *_: frontend.drain(options.drain_s))
    queue.heartbeat(info)  # who is told that this group serves finds it among the workers
    about = {"engine": engine, "max_seq_len": ready.max_seq_len, "num_pages": ready.num_pages}
    status.ready(lambda: frontend.num_rounds, **about)
    keeper.start()
    frontend.run(ready.max_seq_len)
    link.close()


def tidy_up(config: FrontendConfig) -> None:
    """Behind a killed supervisor; of the group's processes it is this one that does it."""
    remove_socket_directory(Path(config.socket_directory))


def _wait_for_engine(link: FrontendSide) -> Ready:
    (ready,) = link.receive(None)
    assert isinstance(ready, Ready)
    return ready


if __name__ == "__main__":
    run_child("frontend", FrontendConfig, main, tidy_up)
