"""Linear layers, split over the ranks of a tensor-parallel group.

Column-parallel layers split their output; the row-parallel one splits its input, and its outputs are to be summed over
the ranks. Weights stay (out, in) as in checkpoints. Used by attention and the models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.layers.base import Layer, Part, new_parameter
from minisgl_batch.layers.fp8_config import Fp8Config
from minisgl_batch.layers.fp8_weight import Fp8Weight
from minisgl_batch.layers.rotary import rotary_order
from minisgl_batch.layers.sharding import even_share, shard_heads
from minisgl_batch.layers.weight import PlainWeight, Source, Weight
from minisgl_kernels.matmul import Operand


class _Linear(Layer):
    """The parameters of a linear map (in_features -> out_features) as this rank holds them.

    `fp8` says how the weight is in FP8; None: it is of `dtype`, like the bias and all activations.
    """

    weight: Weight

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | None = None,
        fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__()
        shape = out_features, in_features
        self.weight = PlainWeight(shape, dtype, device) if fp8 is None else Fp8Weight(shape, dtype, device, fp8)
        self.bias = new_parameter((out_features,), dtype, device) if bias else None

    def forward(self, x: Operand) -> torch.Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        return self.weight.multiply(x, self.bias)

    def factors(self) -> Iterator[Operand]:
        if self.bias is None:
            yield from self.weight.factors()

    def finish(self) -> None:
        self.weight.finish()


class LinearReplicated(_Linear):
    """The whole layer on every rank."""

    def factors(self) -> Iterator[Operand]:
        return iter(())  # all ranks must get equal bits, and so run the same algorithm

    def parts(self) -> Iterator[Part]:
        yield from self.weight.parts(slice(None), Source(self.weight.shape))
        if self.bias is not None:
            yield Part("bias", self.bias, tuple(self.bias.shape))


@dataclass(frozen=True)
class _Rows:
    """Output rows [start, start + num_rows) of the checkpoint's layer `name`, which has `total` rows."""

    name: str
    total: int
    start: int
    num_rows: int


class _LinearMerged(_Linear):
    """Several layers of the checkpoint that read the same input, as one: this rank's rows of each, stacked."""

    def __init__(
        self,
        in_features: int,
        rows: list[_Rows],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | None,
        fp8: Fp8Config | None,
    ) -> None:
        super().__init__(in_features, sum(r.num_rows for r in rows), bias=bias, dtype=dtype, device=device, fp8=fp8)
        self._rows = rows
        self.split_sizes = [r.num_rows for r in rows]

    def parts(self) -> Iterator[Part]:
        offset = 0
        for rows in self._rows:
            here = slice(offset, offset + rows.num_rows)
            source = Source((rows.total, self.weight.shape[1]), start=rows.start, sibling=rows.name)
            yield from self.weight.parts(here, source)
            if self.bias is not None:
                yield Part("bias", self.bias[here], (rows.total,), start=rows.start, sibling=rows.name)
            offset = here.stop


class LinearColParallelMerged(_LinearMerged):
    """Layers whose outputs are split evenly over the ranks, such as an MLP's gate and up projections.

    Args:
        in_features: width of the input.
        outputs: width of each layer's output, by its name in the checkpoint, in the order of the merged output.

    Raises:
        InvalidParameterError: a width doesn't divide by the group's size.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
        fp8: Fp8Config | None = None,
    ) -> None:
        shares = {name: even_share(width, tp.size) for name, width in outputs.items()}
        rows = [_Rows(name, outputs[name], tp.rank * share, share) for name, share in shares.items()]
        super().__init__(in_features, rows, bias=bias, dtype=dtype, device=device, fp8=fp8)


class LinearQKVMerged(_LinearMerged):
    """Query, key and value projections, split by KV head: see `shard_heads`. Output: [q heads | k heads | v heads].

    Args:
        rotary_dim: how many of a head's dimensions are rotated; if not all, those of queries and keys are in the order
            of `rotary_order`.

    Raises:
        InvalidParameterError: the group's size doesn't suit the heads; lists the sizes that do.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
        rotary_dim: int | None = None,
        fp8: Fp8Config | None = None,
    ) -> None:
        self.heads = heads = shard_heads(num_heads, num_kv_heads, tp.rank, tp.size)
        q = _Rows("q_proj", num_heads * head_dim, heads.q_start * head_dim, heads.num_heads * head_dim)
        k, v = (
            _Rows(name, num_kv_heads * head_dim, heads.kv_start * head_dim, heads.num_kv_heads * head_dim)
            for name in ("k_proj", "v_proj")
        )
        super().__init__(in_features, [q, k, v], bias=bias, dtype=dtype, device=device, fp8=fp8)
        self._head_dim, self._rotary_dim = head_dim, rotary_dim or head_dim

    def finish(self) -> None:
        if self._rotary_dim < self._head_dim:
            rows = [*self.weight.by_row(), *([] if self.bias is None else [self.bias])]
            order = rotary_order(self._rotary_dim, self._head_dim).to(rows[0].device)
            for tensor in rows:
                q_and_k = tensor[: -self.split_sizes[-1]].unflatten(0, (-1, self._head_dim))
                q_and_k.copy_(q_and_k[:, order])
        super().finish()


class LinearRowParallel(_Linear):
    """A layer that gets its input split over the ranks and gives each a share of the output: the output is their sum.

    The shares are summed by the norm that follows (see `RMSNorm`).

    Raises:
        InvalidParameterError: the input's width doesn't divide by the group's size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
        fp8: Fp8Config | None = None,
    ) -> None:
        share = even_share(in_features, tp.size)
        super().__init__(share, out_features, bias=bias, dtype=dtype, device=device, fp8=fp8)
        self._dtype = dtype
        self._tp = tp
        self._in_features = in_features

    def forward(self, x: Operand) -> torch.Tensor:
        """(num_tokens, in_features / tp) -> this rank's share of (num_tokens, out_features).

        It may be gone once another such layer is called.
        """
        bias = self.bias if self._tp.rank == 0 else None  # the sum over the ranks must hold it once
        out = None if self.bias is not None else self._tp.buffer((x.shape[0], self.weight.shape[0]), self._dtype)
        return self.weight.multiply(x, bias, out)

    def parts(self) -> Iterator[Part]:
        out_features, share = self.weight.shape
        source = Source((out_features, self._in_features), dim=1, start=self._tp.rank * share)
        yield from self.weight.parts(slice(None), source)
        if self.bias is not None:
            yield Part("bias", self.bias, (out_features,))
