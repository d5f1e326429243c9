"""The Gumbel-max kernel against its twin and against scores in float64."""

from __future__ import annotations

import pytest
import torch

from minisgl_kernels import reference_sampling, sample_gumbel
from tests.kernels.errors import DTYPES
from tests.kernels.sampling import assert_best, random_rows, spoiled_logits


@pytest.fixture(autouse=True)
def small_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rows of a few hundred tokens take several programs and blocks where the interpreter is slow."""
    if device.type == "cpu":
        monkeypatch.setattr(sample_gumbel, "_LANES", 32)
        monkeypatch.setattr(sample_gumbel, "_NUM_PROGRAMS", 12)


SIZES = [(5, 500), (3, 231), (1, 32), (9, 17), (1, 1)]
GPU_SIZES = [(256, 151_936), (64, 151_936), (1, 151_936), (17, 37_984), (3, 32_003), (700, 5_000)]
at_all_sizes = pytest.mark.parametrize(
    ("num_rows", "size"), [*SIZES, *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in GPU_SIZES)]
)


@at_all_sizes
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_picks_what_its_twin_picks(device: torch.device, num_rows: int, size: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(num_rows, size + 8, device=device) * 3).to(dtype)[:, :size]
    rows = random_rows(num_rows, device)
    got_scores, got = sample_gumbel.sample_gumbel(logits, rows)
    want_scores, want = reference_sampling.sample_gumbel(logits, rows)
    assert got.dtype == torch.int32
    assert_best(got, logits, rows)
    # Scores that differ by less than rounding may be ordered either way; that is rare.
    assert (got == want).float().mean() >= 1 - 2 / num_rows
    torch.testing.assert_close(got_scores, want_scores, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 0.01, 30.0])
def test_flat_and_peaked_distributions(device: torch.device, scale: float) -> None:
    logits = torch.randn(6, 200, device=device) * scale
    temperature = torch.tensor([0.01, 1.0, 50.0] * 3)
    rows = random_rows(6, device, temperature=temperature)
    assert_best(sample_gumbel.sample_gumbel(logits, rows)[1], logits, rows)


def test_ties_go_to_the_lower_id(device: torch.device) -> None:
    logits = torch.randint(-2, 2, (15, 300), device=device).bfloat16()
    rows = random_rows(15, device, temperature=torch.zeros(18))
    for vocab_start in (0, 1, 1000):
        scores, tokens = sample_gumbel.sample_gumbel(logits, rows, vocab_start)
        assert torch.equal(tokens, logits.argmax(dim=1).int() + vocab_start)
        assert torch.equal(scores, logits.float().max(dim=1).values)


def test_excluded_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((10, 200), float("-inf"), device=device)
    allowed = torch.randint(0, 200, (10, 4), device=device)
    logits.scatter_(1, allowed, torch.randn(10, 4, device=device))
    rows = random_rows(10, device)
    tokens = sample_gumbel.sample_gumbel(logits, rows)[1]
    assert (allowed == tokens.unsqueeze(1)).any(dim=1).all()
    assert_best(tokens, logits, rows)


def test_rows_that_arent_finite_get_no_token(device: torch.device) -> None:
    size = 8192 if device.type == "cuda" else 128  # whole blocks, so that some hold nothing else
    logits = spoiled_logits(size, device)
    temperature = torch.tensor([0.0, 0.7])[torch.arange(len(logits) + 3) // 2 % 2]
    rows = random_rows(len(logits), device, temperature=temperature)
    rows = rows._replace(slots=torch.arange(len(logits), dtype=torch.int32, device=device))
    scores, tokens = sample_gumbel.sample_gumbel(logits, rows)
    want_scores, want = reference_sampling.sample_gumbel(logits, rows)
    assert (tokens == -1).tolist() == (want == -1).tolist() == [i % 2 == 1 for i in range(len(logits))]
    torch.testing.assert_close(scores, want_scores, equal_nan=True, atol=2e-5, rtol=1e-6)
    assert_best(tokens[::2], logits[::2], rows._replace(slots=rows.slots[::2], kv_lens=rows.kv_lens[::2]))


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
def test_a_part_of_the_vocabulary_that_isnt_finite_is_the_best(device: torch.device, spoil: float) -> None:
    logits = torch.randn(3, 270, device=device)
    logits[1, 100] = spoil
    logits[2, :180] = float("-inf")  # a part in which nothing may come
    rows = random_rows(3, device)
    parts = [sample_gumbel.sample_gumbel(part, rows, i * 90) for i, part in enumerate(logits.split(90, dim=1))]
    scores, tokens = (torch.stack(x) for x in zip(*parts, strict=True))
    found = tokens.gather(0, scores.argmax(dim=0, keepdim=True)).squeeze(0)
    assert torch.equal(found, sample_gumbel.sample_gumbel(logits, rows)[1])
    assert (found == -1).tolist() == [False, True, False]


def test_parts_of_the_vocabulary_find_the_same_token(device: torch.device) -> None:
    logits = torch.randn(5, 270, device=device).bfloat16()
    rows = random_rows(5, device)
    parts = [sample_gumbel.sample_gumbel(part, rows, i * 90) for i, part in enumerate(logits.split(90, dim=1))]
    scores, tokens = (torch.stack(x) for x in zip(*parts, strict=True))
    whole_scores, whole_tokens = sample_gumbel.sample_gumbel(logits, rows)
    assert torch.equal(scores.max(dim=0).values, whole_scores)
    assert torch.equal(tokens.gather(0, scores.argmax(dim=0, keepdim=True)).squeeze(0), whole_tokens)


def test_no_rows(device: torch.device) -> None:
    scores, tokens = sample_gumbel.sample_gumbel(torch.empty(0, 300, device=device), random_rows(0, device))
    assert scores.shape == tokens.shape == (0,)


@pytest.mark.gpu
def test_replays_in_a_graph(device: torch.device) -> None:
    logits = torch.randn(24, 151_936, device=device).bfloat16()
    rows = random_rows(24, device)
    sample_gumbel.sample_gumbel(logits, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, tokens = sample_gumbel.sample_gumbel(logits, rows)
    for _ in range(3):
        logits.copy_(torch.randn(24, 151_936, device=device))
        rows.kv_lens.add_(1)
        tokens.fill_(-1)
        graph.replay()
        assert_best(tokens, logits, rows)
