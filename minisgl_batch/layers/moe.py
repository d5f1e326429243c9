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
from minisgl_kernels.fused_moe import ClampedSwiglu, fused_moe


class FusedMoE(Layer):
    """Router and experts of one layer.

    Args:
        num_experts: all of them.
        top_k: how many of them a token goes through.
        intermediate_size: width of an expert.
        renormalize: the weights of a token's experts are scaled to a sum of 1.
        block: this layer's name in the checkpoint.
        router: the router's name there.
        projections: the names of an expert's gate, up and down projections there; None: all experts are one tensor
            each of gate and up, in turns, and of down projections, (num_experts, in, out).
        has_biases: router and experts have biases.
        activation: of experts; None: silu.

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
        router: str,
        projections: tuple[str, str, str] | None,
        has_biases: bool,
        activation: ClampedSwiglu | None,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._tp = tp
        self._top_k, self._renormalize = top_k, renormalize
        self._width = intermediate_size
        self._activation = activation
        self._block, self._router, self._projections = block, router, projections
        share = even_share(intermediate_size, tp.size)
        self.router = new_parameter((num_experts, hidden_size), dtype, device)
        self.gate_up = new_parameter((num_experts, 2 * share, hidden_size), dtype, device)  # rows take turns
        self.down = new_parameter((num_experts, hidden_size, share), dtype, device)
        self.router_bias = self.gate_up_bias = self.down_bias = None
        if has_biases:
            self.router_bias = new_parameter((num_experts,), dtype, device)
            self.gate_up_bias = new_parameter((num_experts, 2 * share), dtype, device)
            self.down_bias = new_parameter((num_experts, hidden_size), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> this rank's share of the same shape.

        Like `LinearRowParallel`'s, it may be gone once another such layer is called.
        """
        out = self._tp.buffer(tuple(x.shape), x.dtype)
        return fused_moe(
            x,
            linear(x, self.router, self.router_bias),
            self.gate_up,
            self.down,
            self._top_k,
            renormalize=self._renormalize,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias if self._tp.rank == 0 else None,  # the sum over the ranks must hold it once
            activation=self._activation,
            out=out,
        )

    def parts(self) -> Iterator[Part]:
        yield Part(f"{self._router}.weight", self.router, tuple(self.router.shape), sibling=self._block)
        if self.router_bias is not None:
            yield Part(f"{self._router}.bias", self.router_bias, tuple(self.router_bias.shape), sibling=self._block)
        yield from self._parts_of_all() if self._projections is None else self._parts_of_each(*self._projections)

    def _parts_of_all(self) -> Iterator[Part]:
        num_experts, hidden_size, share = self.down.shape
        start, width = self._tp.rank * share, self._width
        gate_up, down = self.gate_up.transpose(1, 2), self.down.transpose(1, 2)
        wide = (num_experts, hidden_size, 2 * width)
        yield Part("experts.gate_up_proj", gate_up, wide, dim=2, start=2 * start, sibling=self._block)
        yield Part(
            "experts.down_proj", down, (num_experts, width, hidden_size), dim=1, start=start, sibling=self._block
        )
        if self.gate_up_bias is not None and self.down_bias is not None:
            bias, shape = self.gate_up_bias, (num_experts, 2 * width)
            yield Part("experts.gate_up_proj_bias", bias, shape, dim=1, start=2 * start, sibling=self._block)
            yield Part("experts.down_proj_bias", self.down_bias, (num_experts, hidden_size), sibling=self._block)

    def _parts_of_each(self, gate: str, up: str, down: str) -> Iterator[Part]:
        num_experts, hidden_size, share = self.down.shape
        start, wide = self._tp.rank * share, (self._width, hidden_size)
        gates, ups = self.gate_up.view(num_experts, share, 2, hidden_size).unbind(2)
        for i in range(num_experts):
            name = f"experts.{i}.{{}}.weight".format
            yield Part(name(gate), gates[i], wide, start=start, sibling=self._block)
            yield Part(name(up), ups[i], wide, start=start, sibling=self._block)
            yield Part(name(down), self.down[i], wide[::-1], dim=1, start=start, sibling=self._block)

    def finish(self) -> None:
        self.router = pack(self.router)
