"""CUDA graphs of decode steps: captured for some numbers of rows, replayed for any number with padding.

One graph runs the model and ends at the logits; a second one samples from them, with or without the rows' filters.
Steps that read shared prefixes have a family of their own. All graphs use one memory pool, so they are captured from
the largest down and are never replayed at the same time. Called by the engine, on its stream.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl_batch.attention.base import ForwardContext, GraphBackend
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.batch import NO_EDITS, ForwardBatch, ScheduledBatch
from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.engine.sampler import sample_together
from minisgl_batch.engine.tables import DeviceTables
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_batch.layers.base import Layer
from minisgl_batch.models.base import CausalLM
from minisgl_kernels.matmul import Algorithms, tune

logger = logging.getLogger(__name__)


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to capture, ascending: 1, 2, 4, then every 8 up to `max_rows`."""
    sizes = [size for size in (1, 2, 4) if size <= max_rows]
    return sorted({*sizes, *range(8, max_rows + 1, 8), max_rows})


@dataclass(frozen=True)
class GraphParts:
    """What the captured steps are made of.

    Attributes:
        tunes: choose the algorithms of matrix products; else they run by what is active.
    """

    model: CausalLM
    tp: TPGroup
    pool: MHAKVCache
    attention: GraphBackend
    buffers: DecodeBuffers
    tables: DeviceTables
    tunes: bool


class GraphRunner:
    """Decode steps of up to `max_rows` rows as graphs."""

    def __init__(self, parts: GraphParts, max_rows: int, vocab_shard: int, dtype: torch.dtype) -> None:
        self._parts = parts
        self._sizes = graph_sizes(max_rows)
        device = parts.buffers.packed.device
        # Static, since all sizes write to it: a copy for each size would take gigabytes.
        self._logits = torch.empty((max_rows, vocab_shard), dtype=dtype, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._steps: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._samples: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._algorithms: Algorithms | None = None  # the graphs use its workspace

    def capture(self) -> None:
        """Capture all graphs; the pool and the tables hold nothing yet but the dummy row."""
        memory = torch.cuda.graph_pool_handle()
        gc.collect()
        gc.disable()  # a tensor of the device that is collected during a capture would end it
        try:
            if self._parts.tunes:
                layers = (module for module in self._parts.model.modules() if isinstance(module, Layer))
                weights = (weight for layer in layers for weight in layer.factors())
                self._algorithms = tune(weights, self._sizes, self._logits.device)
            started = time.perf_counter()
            with nullcontext() if self._algorithms is None else self._algorithms.active():
                self._capture_all(memory)
        finally:
            gc.enable()
        num_graphs = len(self._steps) + len(self._samples)
        logger.info("captured %d CUDA graphs in %.1f s", num_graphs, time.perf_counter() - started)

    def _capture_all(self, memory: Any) -> None:
        costs = self._parts.attention.sharing_costs
        for size in reversed(self._sizes):
            for shared in (False, True) if costs is not None and size >= costs.min_rows else (False,):
                prepared = self._parts.attention.prepare_capture(size, shared=shared)
                self._steps[size, shared] = self._capture(memory, self._step(size, prepared))
        for size in reversed(self._sizes):
            for any_filter in (False, True):
                self._samples[size, any_filter] = self._capture(memory, self._sampling(size, any_filter))

    def size_for(self, batch: ScheduledBatch) -> int | None:
        """The graph size for a step; None when it is no decode step or has too many rows."""
        if not batch.is_decode or batch.num_rows > self._sizes[-1]:
            return None
        return next(size for size in self._sizes if size >= batch.num_rows)

    def forward(self, batch: ScheduledBatch, size: int) -> None:
        """Run the model, up to the logits."""
        self._parts.attention.prepare_replay(batch, size)
        self._steps[size, batch.shared is not None].replay()

    def sample(self, batch: ScheduledBatch, size: int) -> torch.Tensor:
        """Sample from the last step's logits and enter the tokens; (num_rows,) int32, until the next step."""
        self._samples[size, batch.any_filter].replay()
        return self._tokens[: batch.num_rows]

    def last_step(self, batch: ScheduledBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The last step's logits, slots and kv_lens, to sample from them otherwise."""
        buffers, num_rows = self._parts.buffers, batch.num_rows
        return self._logits[:num_rows], buffers.slots[:num_rows], buffers.kv_lens[:num_rows]

    def _step(self, size: int, prepared: object) -> Callable[[], None]:
        parts, buffers, tables = self._parts, self._parts.buffers, self._parts.tables
        batch = ForwardBatch(
            host=_padding(size, buffers.dummy_slot),
            input_ids=buffers.input_ids[:size],
            positions=buffers.positions[:size],
            out_loc=buffers.out_loc[:size],
            slots=buffers.slots[:size],
            kv_lens=buffers.kv_lens[:size],
            q_starts=buffers.indptr[:0],
            page_table=tables.page_table,
            token_pool=tables.token_pool,
            sample_tokens=None,
            targets=None,
            attention=prepared,
        )
        context = ForwardContext(batch, parts.attention, parts.pool)

        def run() -> None:
            buffers.derive(size, tables.page_table, tables.token_pool)
            hidden = parts.model(batch.input_ids, batch.positions, context)
            parts.model.logits(hidden, out=self._logits[:size])

        return run

    def _sampling(self, size: int, any_filter: bool) -> Callable[[], None]:
        model, tp, tables = self._parts.model, self._parts.tp, self._parts.tables
        slots, kv_lens = self._parts.buffers.slots[:size], self._parts.buffers.kv_lens[:size]
        rows = tables.sampling_rows(slots, kv_lens)

        def run() -> None:
            tokens = sample_together(self._logits[:size], rows, model, tp, any_filter=any_filter)
            self._tokens[:size].copy_(tokens)
            tables.put_tokens(slots, kv_lens, tokens)

        return run

    def _capture(self, memory: Any, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        run()  # outside first: kernels are compiled and workspaces allocated
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it collects garbage for each capture, which takes longer than the capture.
        graph.capture_begin(pool=memory)
        run()
        graph.capture_end()
        return graph


def _padding(num_rows: int, dummy_slot: int) -> ScheduledBatch:
    """A decode step of padding rows alone."""
    slots = np.full(num_rows, dummy_slot, dtype=np.int32)
    ones = np.ones(num_rows, dtype=np.int32)
    return ScheduledBatch(
        slots=slots,
        q_lens=ones,
        kv_lens=ones,
        num_decode=num_rows,
        new_pages=-ones,
        samples=ones.astype(np.bool_),
        any_filter=False,
        edits=NO_EDITS,
    )
