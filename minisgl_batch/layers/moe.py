"""A mixture of experts: each token goes through a few of many MLPs, which a router picks for it.

The router is on every rank as a whole; every expert is split over the ranks like a dense MLP. Used by the models.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.layers.base import Layer, Part, new_parameter
from minisgl_batch.layers.packing import linear, pack
from minisgl_batch.layers.sharding import even_share
from minisgl_kernels.fused_moe import fused_moe


class FusedMoE(Layer):
    """Router and experts of one layer.

    Args:
        num_experts: all of them.
        top_k: how many of them a token goes through.
        intermediate_size: width of an expert.
        renormalize: the weights of a token's experts are scaled to a sum of 1.
        block: this layer's name in the checkpoint.
        projections: the names of an expert's gate, up and down projections there.

    Attributes:
        router: its weight, (num_experts, hidden_size).

    Raises:
        InvalidParameterError: an expert's width doesn't divide by the group's size.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        intermediate_size: int,
        renormalize: bool,
        block: str,
        projections: tuple[str, str, str],
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._tp = tp
        self._top_k, self._renormalize = top_k, renormalize
        self._width = intermediate_size
        self._block, self._projections = block, projections
        share = even_share(intermediate_size, tp.size)
        self.router = new_parameter((num_experts, hidden_size), dtype, device)
        self.gate_up = new_parameter((num_experts, 2 * share, hidden_size), dtype, device)  # rows take turns
        self.down = new_parameter((num_experts, hidden_size, share), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> this rank's share of the same shape.

        Like `LinearRowParallel`'s, it may be gone once another such layer is called.
        """
        out = self._tp.buffer(tuple(x.shape), x.dtype)
        logits = linear(x, self.router, None)
        return fused_moe(x, logits, self.gate_up, self.down, self._top_k, renormalize=self._renormalize, out=out)

    def parts(self) -> Iterator[Part]:
        yield Part("gate.weight", self.router, tuple(self.router.shape), sibling=self._block)
        num_experts, hidden_size, share = self.down.shape
        start, wide = self._tp.rank * share, (self._width, hidden_size)
        gate, up, down = self._projections
        gates, ups = self.gate_up.view(num_experts, share, 2, hidden_size).unbind(2)
        for i in range(num_experts):
            name = f"experts.{i}.{{}}.weight".format
            yield Part(name(gate), gates[i], wide, start=start, sibling=self._block)
            yield Part(name(up), ups[i], wide, start=start, sibling=self._block)
            yield Part(name(down), self.down[i], wide[::-1], dim=1, start=start, sibling=self._block)

    def finish(self) -> None:
        self.router = pack(self.router)
