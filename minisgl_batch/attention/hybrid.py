"""A backend of two halves: one library for extend rows, one for decode rows, each what it is best at.

Decode rows stand in buffers at fixed addresses, so that decode steps can be captured in CUDA graphs. Knows lengths and
pages; which libraries there are is the registry's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minisgl_batch.attention.base import AttnSpec, GraphBackend
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.parts import DecodePart, ExtendPart, TwoLevelPart
from minisgl_batch.batch import ForwardBatch, ScheduledBatch, SharingCosts


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the halves prepared: the first `num_decode` tokens are decode rows, the others extend rows'."""

    num_decode: int
    decode_part: DecodePart
    decode: Any
    extend: Any


class HybridBackend(GraphBackend):
    """See the module's docstring.

    Args:
        extend, decode: the halves.
        two_level: a decode half that reads shared prefixes once; None where there is none.
        buffers: where decode rows stand.
    """

    def __init__(
        self, extend: ExtendPart, decode: DecodePart, two_level: TwoLevelPart | None, buffers: DecodeBuffers
    ) -> None:
        self._extend = extend
        self._decode = decode
        self._two_level = two_level
        self._buffers = buffers

    @property
    def sharing_costs(self) -> SharingCosts | None:
        return None if self._two_level is None else self._two_level.costs

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        host, part, decode = batch.host, self._decode, None
        if host.num_decode:
            part = self._part(shared=host.shared is not None)
            decode = self._prepare_decode(host, host.num_decode, part)
            self._buffers.derive(host.num_decode, batch.page_table, batch.token_pool)
        extend = self._extend.prepare(batch) if host.num_decode < host.num_rows else None
        batch.attention = _Prepared(host.num_decode, part, decode, extend)

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch) -> torch.Tensor:
        prepared: _Prepared = batch.attention
        if prepared.extend is None:
            return prepared.decode_part.forward(q, layer, spec, prepared.decode)
        if prepared.decode is None:
            return self._extend.forward(q, layer, spec, prepared.extend)
        decode_q, extend_q = q[: prepared.num_decode], q[prepared.num_decode :]
        return torch.cat(
            [
                prepared.decode_part.forward(decode_q, layer, spec, prepared.decode),
                self._extend.forward(extend_q, layer, spec, prepared.extend),
            ]
        )

    def prepare_capture(self, num_rows: int, *, shared: bool) -> _Prepared:
        part = self._part(shared=shared)
        return _Prepared(num_rows, part, self._prepare_decode(None, num_rows, part), None)

    def prepare_replay(self, batch: ScheduledBatch, num_rows: int) -> None:
        self._prepare_decode(batch, num_rows, self._part(shared=batch.shared is not None))

    def _part(self, *, shared: bool) -> DecodePart:
        if not shared:
            return self._decode
        assert self._two_level is not None, "nothing here reads shared prefixes"
        return self._two_level

    def _prepare_decode(self, host: ScheduledBatch | None, num_rows: int, part: DecodePart) -> Any:
        part.make_ready(num_rows)
        indptr, kv_lens = self._buffers.fill(host, num_rows)
        return part.prepare(num_rows, indptr, kv_lens)
