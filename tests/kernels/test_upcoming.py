"""The beginning of the next weight that small kernels bring into the cache: which bytes, each once; results stay."""

from __future__ import annotations

import random

import pytest
import torch

from minisgl_kernels import upcoming
from minisgl_kernels.add_rms_norm import add_rms_norm
from minisgl_kernels.silu_and_mul import silu_and_mul
from minisgl_kernels.upcoming import NOTHING, beginning
from tests.kernels.devices import interpreter
from tests.kernels.emulation import emulate, ranges, take_prefetches


@pytest.mark.parametrize(
    ("num_rows", "size", "budget_bytes", "asked_rows", "row_bytes"),
    [
        (34816, 5120, 8 << 20, 16896, 384),  # one wave of tiles, and lines of 128 bytes within the budget
        (5120, 17408, 8 << 20, 5120, 1536),
        (5120, 17408, 24 << 20, 5120, 4864),
        (1024, 3072, 8 << 20, 1024, 6144),  # all of a small weight
        (34816, 5120, 1 << 20, 16896, 128),  # at least a line of each row
        (10, 24, 8 << 20, 10, 48),
    ],
)
def test_the_first_columns_of_the_first_rows_are_taken(
    num_rows: int, size: int, budget_bytes: int, asked_rows: int, row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upcoming, "BUDGET_BYTES", budget_bytes)
    weight = torch.empty((num_rows, size), dtype=torch.bfloat16)
    assert beginning(weight, 256) == (weight.data_ptr(), asked_rows, 2 * size, row_bytes)


def test_what_can_not_be_used_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(64, 64, dtype=torch.bfloat16)
    assert beginning(weight, 257) == NOTHING  # so many tokens need no help
    assert beginning(None, 1) == NOTHING
    assert beginning(weight.t(), 1) == NOTHING
    assert beginning(weight[:, 4:], 1) == NOTHING  # rows must begin at multiples of 16 bytes
    assert beginning(torch.empty(64, 60, dtype=torch.bfloat16), 1) == NOTHING
    assert beginning(weight[:, 8:20], 1) == (weight.data_ptr() + 16, 64, 128, 16)
    monkeypatch.setattr(upcoming, "BUDGET_BYTES", 0)
    assert beginning(weight, 1) == NOTHING


@pytest.mark.parametrize("num_tokens", [1, 3, 140])
def test_each_kernel_asks_for_each_row_once(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(monkeypatch)
    emulate(monkeypatch)
    monkeypatch.setattr(upcoming, "BUDGET_BYTES", 200 * 256)
    weights = [torch.empty(random.choice((1, 131, 200, 9000)), 8 * random.randint(1, 40)).bfloat16() for _ in range(3)]
    x, residual = torch.randn(2, num_tokens, 528).bfloat16()
    norm_weight = torch.ones(528).bfloat16()
    take_prefetches()  # of other tests
    for weight in weights:
        for stream in (None, residual):
            add_rms_norm(x, stream, norm_weight, 1e-6, upcoming=weight)
            assert sorted(take_prefetches()) == ranges(beginning(weight, num_tokens))
        silu_and_mul(x, upcoming=weight)
        assert sorted(take_prefetches()) == ranges(beginning(weight, num_tokens))
    silu_and_mul(x)
    add_rms_norm(x, None, norm_weight, 1e-6)
    assert not take_prefetches()


@pytest.mark.parametrize("place", ["emulator", "interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_results_do_not_depend_on_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda") if place == "gpu" else interpreter(monkeypatch)
    if place == "emulator":
        emulate(monkeypatch)
    size, all_num_tokens = (5120, (1, 64, 131, 133, 256, 257)) if place == "gpu" else (40, (1, 3))
    weight = torch.randn(4 * size, size, device=device).bfloat16()
    for num_tokens in all_num_tokens:
        x, residual = torch.randn(2, num_tokens, size, device=device).bfloat16()
        streams = [residual.clone() for _ in range(2)]
        normed, normed_too = (
            add_rms_norm(x, stream, weight[0], 1e-6, upcoming=weights)[0]
            for stream, weights in zip(streams, (None, weight), strict=True)
        )
        assert torch.equal(normed, normed_too)
        assert torch.equal(*streams)
        assert torch.equal(silu_and_mul(x), silu_and_mul(x, upcoming=weight))
