"""Which tokens of a step get their log-probabilities reported, and the step's answers as a message has them.

Called by the scheduler, for steps with rows that ask for `logprobs` or `prompt_logprobs`.
"""

from __future__ import annotations

import numpy as np

from minisgl_batch.batch import BoolArray, IntArray, ScheduledBatch, Scoring
from minisgl_batch.messages import Scores
from minisgl_batch.scheduler.table import TableManager


def plan(
    table: TableManager, slots: IntArray, q_lens: IntArray, kv_lens: IntArray, samples: BoolArray
) -> Scoring | None:
    """What a step has to score; None: nothing. Arguments are as in ScheduledBatch."""
    of_output, of_prompt = table.num_logprobs[slots[samples]], table.num_prompt_logprobs[slots]
    if not (of_output >= 0).any() and not (of_prompt >= 0).any():
        return None
    # A token's score comes from the hidden state of the one before it, so a prompt's last token scores none of it.
    starts = kv_lens - q_lens
    firsts = np.maximum(table.first_scored[slots] - 1 - starts, 0)
    num_scored = np.minimum(kv_lens, table.num_prompt[slots] - 1) - starts - firsts
    rows = np.flatnonzero((of_prompt >= 0) & (num_scored > 0)).astype(np.int32)
    sampled = np.flatnonzero(of_output >= 0).astype(np.int32)
    if not len(rows) and not len(sampled):
        return None
    num_top = int(max(of_output[sampled].max(initial=0), of_prompt[rows].max(initial=0)))
    return Scoring(num_top, sampled, rows, firsts[rows], num_scored[rows])


def overflowed(batch: ScheduledBatch, words: IntArray) -> IntArray:
    """Slots of the rows of whose prompts some log-probability isn't a number."""
    scoring = batch.scoring
    assert scoring is not None
    of_prompts = words.reshape(-1, scoring.num_words)[len(scoring.sampled) :, 0].view(np.float32)
    slots: IntArray = np.unique(np.repeat(batch.slots[scoring.rows], scoring.counts)[np.isnan(of_prompts)])
    return slots


def scores(table: TableManager, batch: ScheduledBatch, words: IntArray) -> Scores:
    """The scores of rows that still run, from what the engine gave; marks prompts that have all of theirs."""
    scoring = batch.scoring
    assert scoring is not None
    words = words.reshape(-1, scoring.num_words)
    sampled = batch.slots[batch.samples][scoring.sampled]
    alive = table.running[sampled]
    prompts, first = [], len(sampled)
    pieces = zip(scoring.rows.tolist(), scoring.firsts.tolist(), scoring.counts.tolist(), strict=True)
    for row, skipped, count in pieces:
        slot, end = int(batch.slots[row]), int(batch.kv_lens[row])
        if table.running[slot]:
            start = end - int(batch.q_lens[row]) + skipped
            prompts.append((int(table.uid[slot]), start + 1, words[first : first + count].tobytes()))
            if end >= table.num_prompt[slot] - 1:
                table.end_prompt_logprobs(slot)
        first += count
    return Scores(scoring.num_top, table.uid[sampled[alive]].tobytes(), words[: len(sampled)][alive].tobytes(), prompts)
