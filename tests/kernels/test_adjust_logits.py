"""The kernels that change logits against their twin, and both against penalties and rules token by token."""

from __future__ import annotations

import random

import pytest
import torch

from minisgl_kernels import adjust_logits, reference_sampling
from minisgl_kernels.adjust_logits import AdjustedRows
from tests.kernels.errors import DTYPES

ALWAYS = (1 << 31) - 1
Rule = tuple[int, float, int, int]


@pytest.fixture(autouse=True)
def few_lanes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes texts of some tens of tokens take several rounds where the interpreter is slow."""
    if device.type == "cpu":
        monkeypatch.setattr(adjust_logits, "_LANES", 8)
        monkeypatch.setattr(adjust_logits, "_NUM_SPLITS", 2)


def random_rules(vocab: int, output: list[int]) -> list[Rule]:
    """Biases, some of them on tokens that mustn't come for a while, and words of which some have begun."""
    biased = random.sample(range(vocab), min(vocab, random.choice([0, 3, 20])))
    rules = [(token, random.uniform(-9, 9), ALWAYS, 1) for token in biased]
    rules += [(token, -torch.inf, random.choice([0, len(output), len(output) + 1]), 1) for token in biased[:2]]
    for length in random.choices([2, 3, 4], k=random.randrange(4)):
        begun = output[len(output) - length + 1 :] if len(output) >= length - 1 else []
        before = begun if begun and random.random() < 0.6 else random.choices(range(vocab), k=length - 1)
        rules += [(token, 0.0, 0, 0) for token in before]
        rules.append((random.randrange(vocab), -torch.inf, ALWAYS, length))
    return rules


def make_rows(
    texts: list[list[int]], num_prompt: list[int], rules: list[list[Rule]], device: torch.device
) -> AdjustedRows:
    """Row i on some slot; a third of the rows has no penalty, and each penalty is off in half of the others."""
    num_slots = len(texts) + 2
    slots = torch.randperm(num_slots)[: len(texts)]
    pool = torch.randint(0, 7, (num_slots, max(map(len, texts)) + 3), dtype=torch.int32)
    table = torch.full((num_slots, max(map(len, rules)) + 1, 4), 5, dtype=torch.int32)
    prompts, num_rules = torch.zeros(num_slots, dtype=torch.int64), torch.zeros(num_slots, dtype=torch.int32)
    for slot, text, prompt, lines in zip(slots.tolist(), texts, num_prompt, rules, strict=True):
        pool[slot, : len(text)] = torch.tensor(text)
        prompts[slot], num_rules[slot] = prompt, len(lines)
        for i, (token, value, end, length) in enumerate(lines):
            bits = torch.tensor(value).view(torch.int32).item()
            table[slot, i] = torch.tensor([token, bits, end, length])
    penalised = torch.rand(num_slots) < 2 / 3

    def penalty(neutral: float, low: float, high: float) -> torch.Tensor:
        on = penalised & (torch.rand(num_slots) < 0.5)
        return torch.where(on, torch.rand(num_slots) * (high - low) + low, neutral)

    values = (penalty(0.0, -2, 2), penalty(0.0, -2, 2), penalty(1.0, 0.2, 3))
    kv_lens = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    rows = AdjustedRows(slots.int(), kv_lens, prompts, pool, *values, num_rules, table)
    return AdjustedRows(*(x.to(device) for x in rows))


def expected(logits: torch.Tensor, rows: AdjustedRows, vocab_start: int) -> torch.Tensor:
    """Token by token, in Python."""
    out = logits.double()
    for row, (slot, kv_len) in enumerate(zip(rows.slots.tolist(), rows.kv_lens.tolist(), strict=True)):
        text, num_prompt = rows.token_pool[slot, :kv_len].tolist(), int(rows.num_prompt[slot])
        output = text[num_prompt:]
        lines = rows.rules[slot, : int(rows.num_rules[slot])].tolist()
        for i, (token, _, end, length) in enumerate(lines):
            word = [line[0] for line in lines[i - length + 1 : i + 1]]
            says = length > 0 and [*output, token][-length:] == word
            if says and len(output) < end and 0 <= token - vocab_start < logits.shape[1]:
                out[row, token - vocab_start] += rows.rules[slot, i, 1].view(torch.float32).item()
        presence, frequency, repetition = (float(x[slot]) for x in (rows.presence, rows.frequency, rows.repetition))
        for token in set(text):
            if 0 <= token - vocab_start < logits.shape[1]:
                logit = float(out[row, token - vocab_start])
                logit = logit / repetition if logit > 0 else logit * repetition
                count = output.count(token)
                out[row, token - vocab_start] = logit - count * frequency - (presence if count else 0.0)
    return out.float()


SIZES = [(4, 60, 50), (3, 33, 7), (1, 1, 5), (2, 200, 90)]
GPU_SIZES = [(256, 151_936, 3000), (8, 32_003, 40_000), (1, 151_936, 1)]


@pytest.mark.parametrize(
    ("num_rows", "vocab", "most_tokens"), [*SIZES, *(pytest.param(*size, marks=pytest.mark.gpu) for size in GPU_SIZES)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_twin_and_definition_agree(
    device: torch.device, num_rows: int, vocab: int, most_tokens: int, dtype: torch.dtype
) -> None:
    width = -(-vocab // 2)
    few = max(1, vocab // 3)  # tokens that come several times
    texts = [random.choices(range(few), k=random.randint(1, most_tokens)) for _ in range(num_rows)]
    num_prompt = [random.randint(1, len(text)) for text in texts]
    rules = [random_rules(vocab, text[n:]) for text, n in zip(texts, num_prompt, strict=True)]
    rows = make_rows(texts, num_prompt, rules, device)
    logits = (torch.randn(num_rows, 2 * width, device=device) * 5).to(dtype)
    for vocab_start, shard in ((0, logits[:, :vocab]), (0, logits[:, :width]), (width, logits[:, width:])):
        before = shard.clone()
        got = adjust_logits.adjust_logits(shard, rows, vocab_start)
        assert got.dtype == torch.float32
        assert torch.equal(shard, before)
        torch.testing.assert_close(
            got, reference_sampling.adjust_logits(shard, rows, vocab_start), atol=1e-4, rtol=1e-5
        )
        if vocab < 1000:
            torch.testing.assert_close(got, expected(shard, rows, vocab_start), atol=1e-4, rtol=1e-5)


def test_a_small_penalty_of_a_large_logit_is_not_rounded_away(device: torch.device) -> None:
    rows = make_rows([[3, 3]], [1], [[]], device)
    ones = torch.ones_like(rows.presence)
    rows = rows._replace(presence=0.01 * ones, frequency=0.0 * ones, repetition=ones)
    logits = torch.full((1, 9), 200.0, device=device).bfloat16()
    got = adjust_logits.adjust_logits(logits, rows)
    assert got[0, 3].item() == pytest.approx(199.99, abs=1e-4)
    assert got[0, 4].item() == 200.0


@pytest.mark.gpu
def test_replays_in_a_graph(device: torch.device) -> None:
    texts = [random.choices(range(50), k=random.randint(2, 400)) for _ in range(24)]
    rows = make_rows(texts, [1] * 24, [random_rules(50, text[1:]) for text in texts], device)
    logits = torch.randn(24, 151_936, device=device).bfloat16()
    adjust_logits.adjust_logits(logits, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = adjust_logits.adjust_logits(logits, rows)
    for _ in range(3):
        logits.copy_(torch.randn(24, 151_936, device=device))
        rows.kv_lens.sub_(1).clamp_(min=1)
        graph.replay()
        torch.testing.assert_close(got, reference_sampling.adjust_logits(logits, rows), atol=1e-4, rtol=1e-5)
