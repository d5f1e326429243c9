"""The kernel that rules tokens out against its twin, and both against a set of tokens per row."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minisgl_kernels import mask_logits, reference_sampling
from tests.kernels.errors import DTYPES

SIZES = [(3, 100, 2), (1, 33, 1), (5, 64, 5), (2, 7, 0)]
GPU_SIZES = [(256, 151_936, 200), (7, 32_003, 7)]


def pack(allowed: set[int], num_words: int) -> list[int]:
    """The int32 words of a mask."""
    bits = sum(1 << token for token in allowed)
    words = [bits >> 32 * i & 0xFFFFFFFF for i in range(num_words)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def random_mask(vocab: int) -> set[int]:
    share = random.choice([0.0, 0.05, 0.5, 1.0])
    return {token for token in range(vocab) if random.random() < share}


@pytest.mark.parametrize(
    ("num_rows", "vocab", "num_masks"), [*SIZES, *(pytest.param(*size, marks=pytest.mark.gpu) for size in GPU_SIZES)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_twin_and_definition_agree(
    device: torch.device,
    num_rows: int,
    vocab: int,
    num_masks: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(mask_logits, "_COLUMNS", 32)
    width, num_words = -(-vocab // 2), -(-vocab // 32)
    sets = [random_mask(vocab) for _ in range(num_masks)]
    lines = random.sample([*range(num_masks), *[-1] * num_rows], num_rows)
    masks = torch.tensor([pack(allowed, num_words) for allowed in sets], dtype=torch.int32, device=device)
    masks = masks.reshape(num_masks, num_words)
    logits = (torch.randn(num_rows, 2 * width, device=device) * 5).to(dtype)
    logits[torch.rand(logits.shape, device=device) < 0.1] = -torch.inf
    logits[:, :2] = torch.tensor([torch.nan, torch.inf])  # for the sampler to see
    places = torch.tensor(lines, dtype=torch.int32, device=device)
    for start, shard in ((0, logits[:, :vocab]), (0, logits[:, :width]), (width, logits[:, width:])):
        before = shard.clone()
        got = mask_logits.mask_logits(shard, masks, places, start)
        torch.testing.assert_close(shard, before, rtol=0, atol=0, equal_nan=True)
        want = reference_sampling.mask_logits(shard, masks, places, start)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        for row, line in enumerate(lines):
            if line < 0:
                torch.testing.assert_close(got[row], shard[row], rtol=0, atol=0, equal_nan=True)
                continue
            allowed = {token - start for token in sets[line]}
            for column in random.sample(range(shard.shape[1]), min(40, shard.shape[1])):
                value, given = float(got[row, column]), float(shard[row, column])
                if column not in allowed:
                    assert value == -torch.inf
                elif given > -torch.inf:
                    assert value == given
                elif math.isnan(given):
                    assert math.isnan(value)
                else:
                    assert -torch.inf < value < -1e4
