"""Single layers against plain mathematics."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.layers.base import Layer, Part
from minisgl_batch.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl_batch.layers.linear import (
    LinearColParallelMerged,
    LinearQKVMerged,
    LinearReplicated,
    LinearRowParallel,
)
from minisgl_batch.layers.norm import RMSNorm
from minisgl_batch.layers.packing import linear, pack
from minisgl_batch.layers.sharding import shard_heads
from minisgl_kernels import matmul
from minisgl_kernels.fixed_order import CpuFixedOrder
from minisgl_kernels.matmul import Operand
from tests.minisgl_batch.distributed.lone_rank import lone_rank

DTYPES = [torch.float32, torch.bfloat16]


def fill(layer: Layer) -> dict[str, torch.Tensor]:
    """Fill a layer from random full tensors, as a checkpoint would; returns them by sibling and name."""
    full = {}
    for part in layer.parts():
        tensor = full[_key(part)] = torch.randn(part.full_shape)
        part.target.copy_(tensor[part.index])
    layer.finish()
    return full


def _key(part: Part) -> str:
    return part.name if part.sibling is None else f"{part.sibling}.{part.name}"


def test_rms_norm_returns_the_stream_too() -> None:
    norm = RMSNorm(16, 1e-2, dtype=torch.float32)
    norm.weight.copy_(torch.randn(16))
    x, residual = torch.randn(2, 7, 16).unbind(0)
    total = x + residual
    want = total / (total.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight
    normed, stream = norm(x, residual)
    assert torch.equal(stream, total)
    torch.testing.assert_close(normed, want)
    normed, stream = norm(total)
    assert stream is total
    torch.testing.assert_close(normed, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 70])
def test_packed_weights_multiply_as_plain_ones(num_rows: int, dtype: torch.dtype) -> None:
    in_features, out_features = random.randrange(1, 90), random.randrange(1, 90)
    weight = nn.Parameter(torch.randn(out_features, in_features, dtype=dtype), requires_grad=False)
    bias = torch.randn(out_features, dtype=dtype)
    x = torch.randn(num_rows, in_features + 5, dtype=dtype)[:, 3:-2]
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1.6e-2}
    packed = pack(weight)
    for b in (bias, None):
        torch.testing.assert_close(linear(x, packed, b), F.linear(x, weight, b), **tolerance)


class Noting(CpuFixedOrder):
    """Notes of how many rows each product was."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def matmul(self, x: Operand, weight: Operand, out: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        self.sizes.append(len(x))
        return super().matmul(x, weight, out)


def test_packed_weights_are_multiplied_in_a_fixed_order_where_that_is_asked_for() -> None:
    """Whether the bits would be others otherwise depends on the processor."""
    weight, bias, x = torch.randn(30, 50), torch.randn(30), torch.randn(70, 50)
    packed, products = pack(nn.Parameter(weight, requires_grad=False)), Noting()
    with matmul.activate(products):
        for b in (bias, None):
            torch.testing.assert_close(linear(x, packed, b), F.linear(x, weight, b), atol=1e-4, rtol=1e-4)
    assert products.sizes == [70, 70]


@pytest.mark.parametrize("bias", [True, False])
def test_replicated_linear_is_whole(bias: bool) -> None:
    layer = LinearReplicated(12, 5, bias=bias, dtype=torch.float32)
    full, x = fill(layer), torch.randn(4, 12)
    torch.testing.assert_close(layer(x), F.linear(x, full["weight"], full.get("bias")))


@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_shards_stack_up(bias: bool) -> None:
    seed, x = random.getrandbits(30), torch.randn(4, 12)
    gates, ups = [], []
    for number in range(3):
        torch.manual_seed(seed)  # every rank reads the same checkpoint
        layer = LinearColParallelMerged(
            12, {"gate": 6, "up": 9}, bias=bias, tp=lone_rank(number, 3), dtype=torch.float32
        )
        full = fill(layer)
        gate, up = layer(x).split((2, 3), dim=-1)
        gates.append(gate)
        ups.append(up)
    torch.testing.assert_close(torch.cat(gates, -1), F.linear(x, full["gate.weight"], full.get("gate.bias")))
    torch.testing.assert_close(torch.cat(ups, -1), F.linear(x, full["up.weight"], full.get("up.bias")))


@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_shards_add_up(bias: bool) -> None:
    seed, x, total = random.getrandbits(30), torch.randn(4, 12), torch.zeros(4, 5)
    for number in range(3):
        torch.manual_seed(seed)
        layer = LinearRowParallel(12, 5, bias=bias, tp=lone_rank(number, 3), dtype=torch.float32)
        full = fill(layer)
        total += layer(x[:, 4 * number : 4 * number + 4])
    torch.testing.assert_close(total, F.linear(x, full["weight"], full.get("bias")))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (12, 6, 3)])
def test_query_heads_are_with_their_kv_head(heads: int, kv_heads: int, size: int) -> None:
    head_dim, seed, x = 4, random.getrandbits(30), torch.randn(3, 10)
    for number in range(size):
        torch.manual_seed(seed)
        layer = LinearQKVMerged(
            10, heads, kv_heads, head_dim, bias=True, tp=lone_rank(number, size), dtype=torch.float32
        )
        full = fill(layer)
        q, k, v = layer(x).split(layer.split_sizes, dim=-1)
        whole = {n: F.linear(x, full[f"{n}_proj.weight"], full[f"{n}_proj.bias"]) for n in "qkv"}
        mine = [whole[n].unflatten(-1, (-1, head_dim)) for n in "qkv"]
        q_heads = range(number * heads // size, (number + 1) * heads // size)
        kv_of_q = sorted({head // (heads // kv_heads) for head in q_heads})
        torch.testing.assert_close(q, mine[0][:, list(q_heads)].flatten(1))
        torch.testing.assert_close(k, mine[1][:, kv_of_q].flatten(1))
        torch.testing.assert_close(v, mine[2][:, kv_of_q].flatten(1))


def test_heads_that_cannot_be_split_list_the_sizes() -> None:
    for size in (3, 5, 16):
        with pytest.raises(InvalidParameterError, match=r"valid sizes: 1, 2, 4, 8$"):
            shard_heads(8, 2, 0, size)
    with pytest.raises(InvalidParameterError, match="dimension of 10 can't be split evenly over 4"):
        LinearRowParallel(10, 5, bias=False, tp=lone_rank(0, 4), dtype=torch.float32)


@pytest.mark.parametrize(("vocab_size", "size"), [(8191, 4), (12, 4), (9, 8), (1, 2)])
def test_vocabulary_shards_cover_every_token_once(vocab_size: int, size: int) -> None:
    seed, ids, hidden = random.getrandbits(30), torch.arange(vocab_size, dtype=torch.int32), torch.randn(3, 6)
    rows, logits, tokens, width = torch.zeros(vocab_size, 6), [], [], -(-vocab_size // size)
    for number in range(size):
        torch.manual_seed(seed)
        embedding = VocabParallelEmbedding(vocab_size, 6, tp=lone_rank(number, size), dtype=torch.float32)
        head = LMHead(vocab_size, 6, tp=lone_rank(number, size), dtype=torch.float32, tied=embedding)
        full = fill(embedding)["weight"]
        assert not fill(head)
        rows += embedding(ids)
        shard = head(hidden)
        assert shard.shape == (3, width)
        assert (shard[:, len(head.vocab_range) :] == -torch.inf).all()
        logits.append(shard[:, : len(head.vocab_range)])
        tokens += head.vocab_range
    assert tokens == list(range(vocab_size))
    assert torch.equal(rows, full)
    torch.testing.assert_close(torch.cat(logits, -1), hidden @ full.T)


def test_a_head_of_its_own_has_its_own_weight() -> None:
    head = LMHead(20, 6, tp=SINGLE, dtype=torch.float32)
    full, hidden = fill(head)["weight"], torch.randn(2, 6)
    torch.testing.assert_close(head(hidden), hidden @ full.T)
    assert head.gather(head(hidden)).shape == (2, 20)


def test_algorithms_are_chosen_for_weights_without_a_bias() -> None:
    for bias in (True, False):
        row = LinearRowParallel(4, 4, bias=bias, tp=SINGLE, dtype=torch.float32)
        column = LinearColParallelMerged(4, {"gate": 2, "up": 2}, bias=bias, tp=SINGLE, dtype=torch.float32)
        for layer in (row, column):
            assert [id(factor) for factor in layer.factors()] == ([] if bias else [id(layer.weight.values)])
        # Ranks that chose differently would disagree about the output.
        assert not list(LinearReplicated(4, 4, bias=bias, dtype=torch.float32).factors())
    embedding = VocabParallelEmbedding(9, 4, tp=SINGLE, dtype=torch.float32)
    assert not list(embedding.factors())
    head = LMHead(9, 4, tp=SINGLE, dtype=torch.float32, tied=embedding)
    assert [id(weight) for weight in head.factors()] == [id(embedding.weight)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_are_made_where_and_as_asked(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        layers = [
            LinearReplicated(4, 4, bias=True, dtype=dtype),
            LinearRowParallel(4, 4, bias=True, tp=lone_rank(1, 2), dtype=dtype),
            LinearQKVMerged(4, 4, 2, 2, bias=True, tp=lone_rank(1, 2), dtype=dtype),
            VocabParallelEmbedding(9, 4, tp=lone_rank(1, 2), dtype=dtype),
            RMSNorm(4, 1e-6, dtype=dtype),
        ]
    for parameter in (p for layer in layers for p in layer.parameters()):
        assert (parameter.dtype, parameter.device.type, parameter.requires_grad) == (dtype, "meta", False)


def test_a_parts_index_takes_its_share_of_the_checkpoint() -> None:
    part = Part("weight", torch.empty(6, 2), (6, 5), dim=1, start=3)
    assert torch.equal(torch.arange(30).view(6, 5)[part.index], torch.arange(30).view(6, 5)[:, 3:])
