"""Compares what the ranks of a group run: a fault of ours could let them decide differently, and then they compute
nonsense or wait for each other. Used by the factory where `check_ranks` asks for it.
"""

from __future__ import annotations

import zlib

from minisgl_batch.batch import ScheduledBatch
from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.errors import WorkerError
from minisgl_batch.scheduler.steps import LaunchedStep, StepRunner


class CheckedRunner:
    """Runs steps on an engine, and every `interval` steps compares a checksum of all steps so far.

    Raises:
        WorkerError: the ranks' steps differ; raised by all ranks at the same step.
    """

    def __init__(self, engine: StepRunner, tp: TPGroup, interval: int) -> None:
        self._engine = engine
        self._tp = tp
        self._interval = interval
        self._num_steps = 0
        self._checksum = 0

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self._num_steps += 1
        self._checksum = _checksum(batch, self._checksum)
        if self._num_steps % self._interval == 0:
            sums = [numbers[0] for numbers in self._tp.gather_numbers(self._checksum)]
            if len(set(sums)) > 1:
                raise WorkerError(
                    f"the ranks decided differently within the last {self._interval} steps before step "
                    f"{self._num_steps}; checksums by rank: {', '.join(f'{value:08x}' for value in sums)}"
                )
        return self._engine.launch(batch)


def _checksum(batch: ScheduledBatch, value: int) -> int:
    edits, shared = batch.edits, batch.shared
    arrays = [batch.slots, batch.q_lens, batch.kv_lens, batch.new_pages, batch.samples]
    arrays += [edits.page_index, edits.pages, edits.token_index, edits.tokens]
    if shared is not None:
        arrays += [shared.num_rows, shared.num_pages, shared.pages]
    if (scoring := batch.scoring) is not None:
        arrays += [scoring.sampled, scoring.rows, scoring.firsts, scoring.counts]
    if batch.constrained is not None:
        arrays.append(batch.constrained)
    for array in arrays:
        value = zlib.crc32(array.tobytes(), value)
    facts = (batch.num_decode, batch.any_filter, batch.any_adjust, edits.new_rows)
    return zlib.crc32(repr(facts).encode(), value)
