"""Tokens of running rows to their readers: who is watched, snapshots for new readers, deltas, ends.

Costs next to nothing while nobody reads: text is made incrementally for watched rows only. Called by the frontend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minisgl_batch.reasoning import Reasoning
from minisgl_batch.tokenizer import OutputProcessor, TextDelta
from minisgl_jobs.model import Row
from minisgl_jobs.streams import RowDelta, RowEnd, TokenPublisher
from minisgl_workers.work import ChunkWork


@dataclass(frozen=True, slots=True)
class RunningSample:
    """One request of the engine: which sample of which row of which chunk it is."""

    uid: int
    work: ChunkWork
    row: Row
    sample_index: int
    seed: int
    started_at: float  # Unix seconds


class Publishing:
    """The publishing side of one frontend."""

    def __init__(self, publisher: TokenPublisher) -> None:
        self._publisher = publisher

    def started(self, samples: Iterable[RunningSample], outputs: OutputProcessor) -> None:
        """These are about to run: follow those of watched jobs from their first token."""
        for sample in samples:
            if self._publisher.is_watched(sample.work.job_id):
                outputs.watch(sample.uid)
                self._publisher.add(sample.work.job_id, _delta(sample, 0, ""))

    def delta(self, sample: RunningSample, delta: TextDelta, outputs: OutputProcessor) -> None:
        """New text of a followed sample; one whose readers have left is followed no more."""
        if self._publisher.is_watched(sample.work.job_id):
            self._publisher.add(sample.work.job_id, _delta(sample, delta.offset, delta.text, delta.reasoning))
        else:
            outputs.unwatch(sample.uid)

    def ends(self, spooled: Iterable[tuple[ChunkWork, tuple[int, int]]]) -> None:
        """Results that can't be lost any more: tell readers that these samples are final."""
        for work, key in spooled:
            if self._publisher.is_watched(work.job_id):
                result = work.results[key]
                end = RowEnd(
                    status=result.status,
                    finish_reason=result.finish_reason,
                    num_chars=len(result.whole_text),
                    num_samples=work.num_samples(result.row_index),
                    prompt_tokens=result.prompt_tokens,
                    completion_tokens=result.completion_tokens,
                    error=result.error,
                    custom_id=result.custom_id or "",
                )
                delta = RowDelta(*key, work.lease.attempt, len(result.whole_text), "", end)
                self._publisher.add(work.job_id, delta)

    def tick(self, works: Iterable[ChunkWork], running: Mapping[int, RunningSample], outputs: OutputProcessor) -> None:
        """Send what this tick brought, and to new readers the text so far of all running rows."""
        new_readers = self._publisher.poll({work.job_id for work in works})
        if new_readers:
            for uid, sample in running.items():
                if sample.work.job_id in new_readers:
                    text = outputs.watch(uid) or ""
                    self._publisher.add(sample.work.job_id, _delta(sample, 0, text, outputs.reasoning(uid)))
        self._publisher.flush()


def _delta(sample: RunningSample, offset: int, text: str, reasoning: Reasoning | None = None) -> RowDelta:
    key = (sample.row.row_index, sample.sample_index)
    return RowDelta(*key, sample.work.lease.attempt, offset, text, reasoning=reasoning)
