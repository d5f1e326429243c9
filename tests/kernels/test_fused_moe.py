"""The kernels of a mixture of experts against their twin, and what they promise of the order of rows."""

from __future__ import annotations

import random

import pytest
import torch

from minisgl_kernels import reference_moe
from minisgl_kernels.fused_moe import ClampedSwiglu, fused_moe, max_rows
from minisgl_kernels.moe_routing import max_parts, route
from minisgl_kernels.moe_tiles import Cut, Tile, tile_for
from tests.kernels.errors import DTYPES, assert_close

Weights = tuple[torch.Tensor, torch.Tensor]


def experts(num_experts: int, hidden_size: int, width: int, device: torch.device, dtype: torch.dtype) -> Weights:
    gate_up = torch.randn(num_experts, 2 * width, hidden_size, device=device) * hidden_size**-0.5
    down = torch.randn(num_experts, hidden_size, width, device=device) * width**-0.5
    return gate_up.to(dtype), down.to(dtype)


def shapes(device: torch.device) -> list[tuple[int, int, int, int, int]]:
    """(num_tokens, num_experts, top_k, hidden_size, width)"""
    if device.type == "cpu":
        return [(7, 6, 2, 64, 24), (3, 1, 1, 20, 6), (random.randrange(1, 6), 8, 8, 36, 10), (40, 3, 2, 16, 16)]
    sizes = [(n, 128, 8, 2048, 768) for n in (1, 8, 77, 256, 513, 4096)]
    return [*sizes, (300, 8, 2, 1024, 3584), (50, 60, 4, 2048, 1408), (2000, 128, 8, 2048, 96), (33, 7, 3, 100, 34)]


@pytest.mark.parametrize(
    ("dtype", "renormalize"),
    [(torch.float32, True), (torch.float16, False), (torch.bfloat16, True), (torch.bfloat16, False)],
)
def test_experts(device: torch.device, dtype: torch.dtype, renormalize: bool) -> None:
    for num_tokens, num_experts, top_k, hidden_size, width in shapes(device):
        gate_up, down = experts(num_experts, hidden_size, width, device, dtype)
        x = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
        logits = torch.randn(num_tokens, num_experts, device=device).to(dtype)
        wide = (x.float(), logits, gate_up.float(), down.float(), top_k)
        exact = reference_moe.fused_moe(*wide, renormalize=renormalize)
        twin = reference_moe.fused_moe(x, logits, gate_up, down, top_k, renormalize=renormalize)
        got = fused_moe(x, logits, gate_up, down, top_k, renormalize=renormalize)
        assert_close(got, exact, twin)


@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 1, first=Cut(32, 32, 1, 4, 3), second=Cut(16, 64, 2, 4, 2)),
        Tile(16, 3, first=Cut(16, 64, 4, 4, 2), second=Cut(32, 16, 1, 4, 3)),
        Tile(16, 2, first=Cut(64, 64, 2, 4, 2), second=Cut(32, 32, 1, 4, 3)),
        Tile(32, 3, first=Cut(128, 16, 8, 4, 3), second=Cut(64, 64, 8, 4, 3)),
    ],
    ids=["16", "3 x 16", "2 x 16", "3 x 32"],
)
def test_any_tile_gives_the_same(device: torch.device, tile: Tile) -> None:
    """Sizes that are no multiples of the tile's; experts with no, few and several blocks of rows."""
    dtype = torch.bfloat16
    gate_up, down = experts(5, 72, 40, device, dtype)
    x = torch.randn(90, 72, device=device).to(dtype)
    logits = torch.randn(90, 5, device=device) + torch.tensor([9.0, 1.5, -9.0, 0.0, 0.0], device=device)
    exact = reference_moe.fused_moe(x.float(), logits, gate_up.float(), down.float(), 2, renormalize=True)
    twin = reference_moe.fused_moe(x, logits, gate_up, down, 2, renormalize=True)
    out = torch.full_like(x, torch.nan)
    got = fused_moe(x, logits, gate_up, down, 2, renormalize=True, out=out, tile=tile)
    assert got is out
    assert_close(got, exact, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_and_clamps(device: torch.device, dtype: torch.dtype) -> None:
    """As gpt-oss has them; about half of all gates and ups are clamped."""
    on_cpu = device.type == "cpu"
    shape = (90, 5, 2, 72, 40)
    for num_tokens, num_experts, top_k, hidden_size, width in [shape] if on_cpu else [shape, (600, 32, 4, 2880, 1440)]:
        gate_up, down = experts(num_experts, hidden_size, width, device, dtype)
        biases = {
            "gate_up_bias": torch.randn(num_experts, 2 * width, device=device),
            "down_bias": torch.randn(num_experts, hidden_size, device=device),
        }
        rounded = {name: bias.to(dtype) for name, bias in biases.items()}
        x = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
        logits = torch.randn(num_tokens, num_experts, device=device).to(dtype)
        given = {"renormalize": True, "activation": ClampedSwiglu(1.7, 0.8)}
        wide = {name: bias.float() for name, bias in rounded.items()}
        exact = reference_moe.fused_moe(x.float(), logits, gate_up.float(), down.float(), top_k, **wide, **given)
        twin = reference_moe.fused_moe(x, logits, gate_up, down, top_k, **rounded, **given)
        assert_close(fused_moe(x, logits, gate_up, down, top_k, **rounded, **given), exact, twin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_picks_what_the_twin_picks(device: torch.device, dtype: torch.dtype, renormalize: bool) -> None:
    """Also among equal logits, of which there are many in 16 bits."""
    for num_tokens, num_experts, top_k in ((1, 128, 8), (9, 60, 4), (5, 8, 8), (6, 1, 1), (11, 130, 3)):
        logits = torch.randn(num_tokens, num_experts + 3, device=device).to(dtype)[:, :-3]
        logits[:, num_experts // 2 :] = logits[:, : -(num_experts // 2) or None]
        ids, weights = reference_moe.route(logits, top_k, renormalize=renormalize)
        got = route(logits, top_k, renormalize=renormalize, unit=16, units=1)
        assert torch.equal(got.ids.long(), ids)
        torch.testing.assert_close(got.weights, weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("units", [1, 2, 3])
def test_rows_of_an_expert_are_its_tokens(device: torch.device, units: int) -> None:
    num_tokens, num_experts, top_k, unit = random.randrange(1, 70), random.randrange(3, 20), 3, 4
    logits = torch.randn(num_tokens, num_experts, device=device)
    logits[:, 0] = -99.0  # an expert that nobody wants, if there are enough
    got = route(logits, top_k, renormalize=True, unit=unit, units=units)
    counts = got.counts.tolist()
    assert counts == got.ids.flatten().bincount(minlength=num_experts).tolist()
    members = got.members[got.ids.long(), got.ranks.long()]
    assert torch.equal(members, torch.arange(num_tokens, device=device).int().unsqueeze(1).expand(-1, top_k))
    assert len(set(zip(got.ids.flatten().tolist(), got.ranks.flatten().tolist(), strict=True))) == num_tokens * top_k

    blocks = got.blocks[:, got.blocks[0] > 0].t().tolist()
    assert len(blocks) == sum(-(-count // (unit * units)) for count in counts) <= got.max_blocks
    starts, row = got.starts.tolist(), 0
    for expert, count in enumerate(counts):
        assert starts[expert] * unit == row
        mine = [block for block in blocks if block[1] == expert]
        assert sum(block[0] for block in mine) == count
        assert max((block[0] for block in mine), default=0) <= unit * units
        rank = 0
        for num_rows, _, first_rank, first_row in mine:
            assert (first_rank, first_row) == (rank, row + rank)
            assert first_rank % unit == 0
            rank += num_rows
        row += -(-count // unit) * unit
    assert row <= got.max_rows


def test_logits_that_are_no_numbers_route_somewhere(device: torch.device) -> None:
    logits = torch.full((3, 6), torch.nan, device=device)
    logits[1], logits[2] = -torch.inf, torch.tensor([1.0, torch.nan, 2.0, -torch.inf, 0.0, 0.0])
    got = route(logits, 4, renormalize=True, unit=16, units=1)
    assert got.ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 4, 5]]


def test_bounds_hold_for_any_spread() -> None:
    for _ in range(300):
        num_experts, size = random.randrange(1, 20), random.choice((1, 4, 16))
        counts = [random.choice((0, 1, random.randrange(1, 60))) for _ in range(num_experts)]
        assert sum(-(-count // size) for count in counts) <= max_parts(sum(counts), num_experts, size)
    rows = max_rows(4096, 8, 128, torch.bfloat16)
    assert 4096 * 8 <= rows <= 4096 * 8 + 128 * tile_for(4096 * 8, 128, torch.bfloat16).unit


def test_a_token_is_not_changed_by_others(device: torch.device) -> None:
    gate_up, down = experts(6, 32, 16, device, torch.float32)
    x, logits = torch.randn(30, 32, device=device), torch.randn(30, 6, device=device)
    want = fused_moe(x, logits, gate_up, down, 2, renormalize=True)
    x[1:], logits[1:] = torch.randn(29, 32, device=device), torch.randn(29, 6, device=device)
    assert torch.equal(fused_moe(x, logits, gate_up, down, 2, renormalize=True)[0], want[0])


def test_no_tokens_make_no_launch(device: torch.device) -> None:
    gate_up, down = experts(4, 8, 6, device, torch.float32)
    none = torch.zeros(0, 8, device=device)
    assert fused_moe(none, none[:, :4], gate_up, down, 2, renormalize=True).shape == (0, 8)


def test_a_graph_replays_any_routing(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("CUDA graphs are a GPU's")
    gate_up, down = experts(64, 512, 256, device, torch.bfloat16)
    for num_tokens in (1, 24, 300, 3000):
        x = torch.zeros(num_tokens, 512, device=device, dtype=torch.bfloat16)
        logits = torch.zeros(num_tokens, 64, device=device, dtype=torch.bfloat16)
        fused_moe(x, logits, gate_up, down, 4, renormalize=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_moe(x, logits, gate_up, down, 4, renormalize=True)
        for _ in range(5):
            x.normal_()
            logits.normal_()
            logits[:, random.randrange(64)] += 5.0  # many tokens for one expert
            graph.replay()
            assert torch.equal(out, fused_moe(x, logits, gate_up, down, 4, renormalize=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_token_among_any_number(device: torch.device, dtype: torch.dtype) -> None:
    """Tiles of all sizes add up in one order."""
    num_experts, hidden_size, width = random.choice([(128, 1024, 768), (60, 512, 352), (8, 520, 136)])
    x = torch.randn(3000, hidden_size, device=device).to(dtype)
    logits = torch.randn(3000, num_experts, device=device).to(dtype)
    gate_up = (torch.randn(num_experts, 2 * width, hidden_size, device=device) / hidden_size**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden_size, width, device=device) / width**0.5).to(dtype)
    whole = fused_moe(x, logits, gate_up, down, 4, renormalize=True)
    for num_tokens in (1, 2, 8, 40, 130, 300, 700, 1500):
        start = random.randrange(3000 - num_tokens)
        rows = slice(start, start + num_tokens)
        part = fused_moe(x[rows].contiguous(), logits[rows].contiguous(), gate_up, down, 4, renormalize=True)
        assert torch.equal(part, whole[rows]), num_tokens
