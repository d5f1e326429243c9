"""The fa,cuda backend's metadata on a CPU: the kernel's twin, and a function in flash-attn's place."""

from __future__ import annotations

import random

import pytest
import torch

from minisgl_batch.attention import cuda, flash_attn
from minisgl_batch.attention.base import AttnHeads, AttnSpec
from minisgl_batch.attention.flash_attn import PagedSequences
from minisgl_batch.errors import InvalidParameterError
from minisgl_kernels import reference_attention
from minisgl_kernels.e4m3 import E4M3
from tests.minisgl_batch.attention.steps import PagedCase, random_rows

HEADS = AttnHeads(6, 2, 8, 8**-0.5)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: PagedSequences, spec: AttnSpec, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What flash-attn documents: an empty sequence's queries get zeros and -inf. It knows no sinks."""
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), -torch.inf)
    starts = sequences.q_starts.tolist()
    for i, kv_len in enumerate(sequences.kv_lens.tolist()):
        pages = sequences.pages[i, : -(-kv_len // k.shape[1])]
        keys, values = reference_attention.gather_kv(k, pages, kv_len), reference_attention.gather_kv(v, pages, kv_len)
        mine = range(starts[i], starts[i + 1])
        assert len(mine) <= sequences.max_q_len
        if causal:
            queries = q[mine.start : mine.stop]
            out[mine.start : mine.stop] = reference_attention.attend(queries, keys, values, spec.scale, spec.window)
            lse[:, mine.start : mine.stop] = reference_attention._log_sum_exp(queries, keys, spec.scale, spec.window).T
        elif kv_len:
            for token in mine:  # alone, so that it sees all keys
                one = q[token : token + 1]
                out[token] = reference_attention.attend(one, keys, values, spec.scale)[0]
                lse[:, token] = reference_attention._log_sum_exp(one, keys, spec.scale, None)[0]
    return out, lse


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "can_run", lambda *_: True)
    monkeypatch.setattr(flash_attn, "load", lambda _: attend)
    whole = cuda.make_workspace
    monkeypatch.setattr(cuda, "make_workspace", lambda *args: whole(*args[:5], num_workers=8))


def case(
    page_size: int, window: int | None = None, *, with_sinks: bool = False, kv_dtype: torch.dtype | None = None
) -> PagedCase:
    device = torch.device("cpu")
    return PagedCase("fa,cuda", HEADS, page_size, 120, torch.float32, device, window, with_sinks, kv_dtype)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["", "e4m3"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("page_size", "window"), [(16, None), (32, None), (16, 1), (16, 33), (32, 20)])
@pytest.mark.usefixtures("on_cpu")
def test_both_halves_give_plain_attention(
    page_size: int, window: int | None, with_sinks: bool, kv_dtype: torch.dtype | None
) -> None:
    paged = case(page_size, window, with_sinks=with_sinks, kv_dtype=kv_dtype)
    paged.check(random_rows(20, 0, 120), num_decode=20)
    paged.check(random_rows(0, 9, 120), num_decode=0)
    paged.check(random_rows(7, 5, 120), num_decode=7)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["", "e4m3"])
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (None, True), (30, True)])
@pytest.mark.parametrize("groups", [[(9, 3)], [(3, 3), (2, 5), (4, 1)]])
@pytest.mark.usefixtures("on_cpu")
def test_two_levels_give_what_one_gives(
    groups: list[tuple[int, int]], window: int | None, with_sinks: bool, kv_dtype: torch.dtype | None
) -> None:
    paged = case(16, window, with_sinks=with_sinks, kv_dtype=kv_dtype)
    shared = paged.share_prefixes(groups)
    rows: list[tuple[int, int, int]] = []
    for num_rows, num_pages in groups:
        rows += [(len(rows) + i, 1, random.randint(num_pages * 16 + 1, 120)) for i in range(num_rows)]
    rows += [(slot, 1, random.randint(1, 120)) for slot in range(len(rows), len(rows) + 5)]
    paged.check(rows, num_decode=len(rows), shared=shared)
    paged.check(rows, num_decode=len(rows))


def test_what_it_cannot_run_is_said() -> None:
    with pytest.raises(InvalidParameterError, match="power of two, here 8"):
        case(8)
