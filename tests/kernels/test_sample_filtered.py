"""The kernel for rows with filters against its twin, and against filters in float64."""

from __future__ import annotations

import random

import pytest
import torch

from minisgl_kernels import reference_sampling, sample_filtered, sample_gumbel
from minisgl_kernels.gumbel import SamplingRows
from tests.kernels.errors import DTYPES
from tests.kernels.sampling import assert_best_of_kept, random_rows, spoiled_logits


@pytest.fixture(autouse=True)
def small_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rows of a few hundred tokens take several blocks where the interpreter is slow."""
    if device.type == "cpu":
        monkeypatch.setattr(sample_gumbel, "_LANES", 64)
        monkeypatch.setattr(sample_filtered, "_LANES", 64)


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    tokens = sample_filtered.sample_filtered(logits, rows)
    assert tokens.dtype == torch.int32
    assert_best_of_kept(tokens, logits, rows)
    return tokens


def random_filters(num_slots: int, most: int) -> dict[str, torch.Tensor]:
    """Each filter is on in half of the slots."""
    off = torch.rand(3, num_slots) < 0.5
    top_k = torch.randint(1, most, (num_slots,), dtype=torch.int32).masked_fill_(off[0], 0)
    top_p = torch.rand(num_slots).clamp_min_(0.01).masked_fill_(off[1], 1.0)
    return {"top_k": top_k, "top_p": top_p, "min_p": torch.rand(num_slots).mul_(0.5).masked_fill_(off[2], 0.0)}


SIZES = [(6, 200, 40), (2, 300, 350), (3, 63, 10), (1, 1, 3)]
GPU_SIZES = [(256, 151_936, 100), (64, 151_936, 200_000), (1, 151_936, 64), (33, 32_003, 5_000)]
at_all_sizes = pytest.mark.parametrize(
    ("num_rows", "size", "most"), [*SIZES, *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in GPU_SIZES)]
)


@at_all_sizes
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_picks_what_its_twin_picks(
    device: torch.device, num_rows: int, size: int, most: int, dtype: torch.dtype
) -> None:
    logits = (torch.randn(num_rows, size + 8, device=device) * 3).to(dtype)[:, :size]
    rows = random_rows(num_rows, device, **random_filters(num_rows + 3, most))
    tokens = sample(logits, rows)
    assert (tokens == reference_sampling.sample_filtered(logits, rows)).float().mean() >= 1 - 2 / num_rows


@pytest.mark.parametrize("scale", [0.0, 0.05, 30.0])
def test_flat_and_peaked_distributions(device: torch.device, scale: float) -> None:
    logits = torch.randn(3, 150, device=device) * scale
    temperature = torch.tensor([0.05, 1.0, 20.0] * 2)
    sample(logits, random_rows(3, device, temperature=temperature, **random_filters(6, 50)))


@pytest.mark.parametrize(
    ("dtype", "top_p"), [(torch.float32, 1.0), (torch.float32, 0.6), (torch.bfloat16, 0.6), (torch.float16, 1.0)]
)
def test_many_of_the_best_in_one_lane(device: torch.device, dtype: torch.dtype, top_p: float) -> None:
    """Then the lanes' best two don't hold the k best, and the k-th is found by bisection."""
    size = 64 * 6 if device.type == "cpu" else 4096 * 9
    logits = torch.randn(3, size, device=device).to(dtype) - 2
    logits[:, 5 :: size // 6] += 12  # multiples of the number of lanes
    logits[:2, ::7] *= -1
    top_k = torch.tensor([random.randint(3, 90) for _ in range(6)], dtype=torch.int32)
    rows = random_rows(3, device, top_k=top_k, top_p=torch.full((6,), top_p), temperature=torch.full((6,), 3.0))
    sample(logits, rows)


def test_of_equal_logits_top_k_keeps_the_lower_ids(device: torch.device) -> None:
    num_rows, size = 5, 90
    logits = torch.zeros(num_rows, size, device=device)
    logits[:, 70] = 1.0
    on = {"temperature": torch.ones(num_rows + 3), "top_k": torch.full((num_rows + 3,), 3, dtype=torch.int32)}
    tokens = sample(logits, random_rows(num_rows, device, **on))
    assert set(tokens.tolist()) <= {70, 0, 1}


def test_rows_that_arent_finite_get_no_token(device: torch.device) -> None:
    size = 8192 if device.type == "cuda" else 128  # whole blocks, so that some hold nothing else
    logits = spoiled_logits(size, device)
    num_slots = len(logits) + 3
    rows = random_rows(len(logits), device, **random_filters(num_slots, 20))
    tokens = sample_filtered.sample_filtered(logits, rows)
    want = reference_sampling.sample_filtered(logits, rows)
    assert (tokens == -1).tolist() == (want == -1).tolist() == [i % 2 == 1 for i in range(len(logits))]
    finite = rows._replace(slots=rows.slots[::2], kv_lens=rows.kv_lens[::2])
    assert_best_of_kept(tokens[::2], logits[::2], finite)


def test_scores_that_overflow_end_the_search(device: torch.device) -> None:
    logits = -3e38 + 1e37 * torch.rand(8, 200, device=device)
    filters = random_filters(11, 20) | {"temperature": torch.full((11,), 1e-5), "min_p": torch.full((11,), 0.9)}
    tokens = sample_filtered.sample_filtered(logits, random_rows(8, device, **filters))
    assert ((tokens >= -1) & (tokens < 200)).all()


@pytest.mark.gpu
def test_replays_in_a_graph(device: torch.device) -> None:
    logits = torch.randn(24, 151_936, device=device).bfloat16()
    rows = random_rows(24, device, **random_filters(27, 100))
    sample(logits, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_filtered.sample_filtered(logits, rows)
    for _ in range(3):
        logits.copy_(torch.randn(24, 151_936, device=device) * 4)
        rows.kv_lens.add_(1)
        tokens.fill_(-1)
        graph.replay()
        assert_best_of_kept(tokens, logits, rows)
