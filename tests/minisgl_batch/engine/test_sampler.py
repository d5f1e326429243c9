"""The sampler: greedy is exact, samples follow the softmax, and neither neighbours nor ranks change anything."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.engine.sampler import sample
from minisgl_kernels.gumbel import SamplingRows


def rows(num_rows: int, **changes: torch.Tensor) -> SamplingRows:
    """Row i is slot i."""
    values = {
        "slots": torch.arange(num_rows, dtype=torch.int32),
        "kv_lens": torch.arange(7, num_rows + 7, dtype=torch.int32),
        "num_prompt": torch.full((num_rows,), 7),
        "seeds": torch.randint(0, 1 << 62, (num_rows,)),
        "sample_indices": torch.zeros(num_rows, dtype=torch.int64),
        "temperature": torch.ones(num_rows),
        "top_k": torch.zeros(num_rows, dtype=torch.int32),
        "top_p": torch.ones(num_rows),
        "min_p": torch.zeros(num_rows),
    }
    return SamplingRows(**(values | changes))


def test_greedy_is_argmax_and_ties_go_to_the_lower_id() -> None:
    logits = torch.randn(50, 300)
    logits[7, 100] = logits[7, 200] = 100.0
    for any_filter in (False, True):
        tokens = sample(logits, rows(50, temperature=torch.zeros(50)), any_filter=any_filter)
        assert torch.equal(tokens, logits.argmax(-1).int())
        assert tokens[7] == 100


def test_greedy_rows_stay_greedy_among_sampled_ones() -> None:
    logits = torch.randn(40, 100)
    temperature = torch.where(torch.arange(40) % 2 == 0, 0.0, 1.3)
    for any_filter in (False, True):
        tokens = sample(logits, rows(40, temperature=temperature), any_filter=any_filter)
        assert torch.equal(tokens[::2], logits[::2].argmax(-1).int())
        assert not torch.equal(tokens[1::2], logits[1::2].argmax(-1).int())


def test_samples_follow_the_softmax() -> None:
    num_rows, temperature = 40_000, 0.7
    logits = torch.randn(12)
    values = rows(num_rows, temperature=torch.full((num_rows,), temperature))
    tokens = sample(logits.expand(num_rows, -1), values, any_filter=False)
    seen = torch.bincount(tokens, minlength=12) / num_rows
    torch.testing.assert_close(seen, (logits / temperature).softmax(-1), atol=0.012, rtol=0)


def test_filters_only_remove() -> None:
    """With all filters neutral the filtering path draws the same tokens as the plain one."""
    logits, values = torch.randn(100, 200), rows(100)
    assert torch.equal(sample(logits, values, any_filter=True), sample(logits, values, any_filter=False))


def test_filtered_rows_draw_from_what_is_left() -> None:
    num_rows = 2000
    logits = torch.randn(50)
    values = rows(num_rows, top_k=torch.full((num_rows,), 3, dtype=torch.int32))
    tokens = sample(logits.expand(num_rows, -1), values, any_filter=True)
    assert set(tokens.tolist()) == set(logits.topk(3).indices.tolist())


@pytest.mark.parametrize(
    "filters", [{"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.7, "min_p": 0.03}], ids=str
)
def test_filtered_samples_follow_the_distribution_of_transformers(filters: dict[str, float]) -> None:
    """By chi-square over many draws; filters come in the order in which `generate` has them."""
    num_rows, temperature = 20_000, 0.8
    logits = torch.randn(1, 30) * 2
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    scores = logits / temperature
    for name, warper in warpers.items():
        if name in filters:
            scores = warper(filters[name])(torch.zeros(1, 1), scores)
    want = scores[0].softmax(-1) * num_rows

    given = {
        name: torch.full((num_rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in filters.items()
    }
    values = rows(num_rows, temperature=torch.full((num_rows,), temperature), **given)
    seen = torch.bincount(sample(logits.expand(num_rows, -1), values, any_filter=True), minlength=30)

    kept = want > 0
    assert not seen[~kept].any()
    chi_square = ((seen - want) ** 2 / want)[kept].sum()
    degrees = max(1, int(kept.sum()) - 1)
    assert chi_square < degrees + 10 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("any_filter", [False, True])
def test_a_row_draws_the_same_alone_and_among_others(any_filter: bool) -> None:
    logits, values = torch.randn(30, 64), rows(30, temperature=torch.rand(30))
    together = sample(logits, values, any_filter=any_filter)
    order = torch.randperm(30)[:7]
    alone = values._replace(slots=values.slots[order], kv_lens=values.kv_lens[order])
    assert torch.equal(sample(logits[order], alone, any_filter=any_filter), together[order])


class Shards:
    """The all-gather of a group whose ranks run one after the other: collects, then answers."""

    def __init__(self, size: int) -> None:
        self.sent: list[torch.Tensor] = []
        self.size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent.append(x)
        return torch.stack((self.sent * self.size)[: self.size])

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def prepare(self, num_bytes: int) -> None:
        pass

    def fix_order(self, dtype: torch.dtype) -> bool:
        return True

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return None

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        raise NotImplementedError

    def describe(self) -> str:
        return ""

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_with_parts_of_the_vocabulary_find_the_same_tokens(size: int) -> None:
    logits = torch.randn(60, 48 * size)
    logits[::5, 3::48] = 50.0  # a tie between all ranks
    logits[torch.arange(1, 60, 5), torch.randint(0, 48 * size, (12,))] = torch.tensor([torch.nan, torch.inf] * 6)
    logits[2::5, torch.randperm(48 * size)[: 24 * size]] = -torch.inf
    logits[2::5, :48] = -torch.inf  # all that a rank has
    values = rows(60, temperature=torch.rand(60).round(decimals=1))
    comm = Shards(size)
    for rank, shard in enumerate(logits.split(48, dim=1)):
        tp = TPGroup(rank, size, comm)
        tokens = sample(shard, values, any_filter=False, vocab_start=48 * rank, tp=tp)
    assert torch.equal(tokens, sample(logits, values, any_filter=False))
    assert (tokens == -1).nonzero().squeeze(1).tolist() == list(range(1, 60, 5))
