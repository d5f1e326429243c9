"""The paged attention kernels against their twin: shapes, ragged rows, windows, and poison behind each row's end."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from minisgl_kernels import paged_attention as module
from minisgl_kernels import reference_attention
from minisgl_kernels.e4m3 import E4M3
from minisgl_kernels.paged_attention import PagedRows, paged_attention
from tests.kernels.errors import DTYPES, relative_error
from tests.kernels.paged import Case, random_case

# (group, head_dim, page_size): each value somewhere in the interpreter, each group with each page size on a GPU
SOME = [(1, 64, 1), (2, 96, 16), (4, 128, 64), (5, 256, 128), (8, 64, 16), (5, 128, 16)]
HEAD_DIMS = itertools.cycle((64, 96, 128, 256, 128))
MORE = [(group, next(HEAD_DIMS), page) for group in (1, 2, 4, 5, 8) for page in (1, 16, 64, 128)]
at_all_shapes = pytest.mark.parametrize(
    "shape", [*SOME, *(pytest.param(s, marks=pytest.mark.gpu) for s in MORE)], ids=str
)


def lengths(device: torch.device, num_rows: int) -> list[int]:
    longest = 150 if device.type == "cpu" else 3000
    return [1, *(random.randint(1, longest) for _ in range(num_rows - 1))]


def pieces(kv_lens: list[int]) -> list[int]:
    """How many tokens of each row are computed: all, a piece behind a cached prefix, or one."""
    return [random.choice([n, random.randint(1, n), 1]) for n in kv_lens]


@at_all_shapes
def test_decode(device: torch.device, shape: tuple[int, int, int]) -> None:
    group, head_dim, page_size = shape
    kv_lens = lengths(device, 2 if device.type == "cpu" else 33)
    random_case(device, kv_lens, None, group=group, head_dim=head_dim, page_size=page_size).check()


@at_all_shapes
def test_extend(device: torch.device, shape: tuple[int, int, int]) -> None:
    group, head_dim, page_size = shape
    kv_lens = lengths(device, 2 if device.type == "cpu" else 7)
    case = random_case(device, kv_lens, pieces(kv_lens), group=group, head_dim=head_dim, page_size=page_size)
    case.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 40, 1000])
def test_windows_and_types(device: torch.device, dtype: torch.dtype, window: int) -> None:
    kv_lens = lengths(device, 2)
    random_case(device, kv_lens, None, dtype=dtype, num_kv_heads=1).check(window)
    random_case(device, kv_lens, pieces(kv_lens), dtype=dtype, num_kv_heads=1).check(window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks_count_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_splits: int, window: int | None
) -> None:
    monkeypatch.setattr(module, "_num_splits", lambda *_: num_splits)
    kv_lens = lengths(device, 3)
    random_case(device, kv_lens, None, group=3, dtype=torch.float32).check(window, with_sinks=True)
    random_case(device, kv_lens, pieces(kv_lens), group=3).check(window, with_sinks=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_e4m3_pools(device: torch.device, dtype: torch.dtype) -> None:
    kv_lens = lengths(device, 2 if device.type == "cpu" else 33)
    for q_lens in (None, pieces(kv_lens)):
        random_case(device, kv_lens, q_lens, dtype=dtype, kv_dtype=E4M3, group=5).check(random.choice([None, 40]))


@pytest.mark.parametrize("num_splits", [2, 8])
def test_split_rows_and_padding(device: torch.device, monkeypatch: pytest.MonkeyPatch, num_splits: int) -> None:
    """Short rows leave splits empty; padding rows have one token in the dummy's page."""
    monkeypatch.setattr(module, "_num_splits", lambda *_: num_splits)
    case = random_case(device, [1, 1, 130, 77], None, group=5)
    case.rows.slots[1] = case.rows.slots[0]
    case.check()
    case.check(window=33)


def test_pieces_of_a_prompt_give_what_the_whole_gives(device: torch.device) -> None:
    case = random_case(device, [140], [140], num_kv_heads=1)
    scale = case.q.shape[2] ** -0.5
    whole, whole_lse = paged_attention(case.q, case.k_pool, case.v_pool, case.rows, scale)
    cut = random.randint(1, 139)
    for begin, end in ((0, cut), (cut, 140)):
        rows = case.rows._replace(
            kv_lens=torch.tensor([end], dtype=torch.int32, device=device),
            q_starts=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            max_q_len=end - begin,
        )
        piece, lse = paged_attention(case.q[begin:end], case.k_pool, case.v_pool, rows, scale)
        assert relative_error(piece, whole[begin:end]) < 5e-3
        torch.testing.assert_close(lse, whole_lse[begin:end], atol=1e-3, rtol=1e-4)


def test_large_scores_overflow_nothing(device: torch.device) -> None:
    for q_lens in (None, [70]):
        case = random_case(device, [90], q_lens, dtype=torch.float32, num_kv_heads=1)
        case.q.mul_(100)
        case.k_pool.mul_(100)
        scale = case.q.shape[2] ** -0.5
        got, _ = paged_attention(case.q, case.k_pool, case.v_pool, case.rows, scale)
        want, _ = reference_attention.paged_attention(case.q, case.k_pool, case.v_pool, case.rows, scale)
        assert relative_error(got, want) < 2e-3


def test_the_twin_sums_the_weights_it_attends_with() -> None:
    kv_lens = [9, 30]
    case = random_case(torch.device("cpu"), kv_lens, pieces(kv_lens), dtype=torch.float32)
    for window in (None, 4):
        _, lse = reference_attention.paged_attention(case.q, case.k_pool, case.v_pool, case.rows, 0.3, window)
        # A value of one for one token and zero for the others gives that token's weight: exp(score - lse).
        slot, kv_len, end = int(case.rows.slots[1]), kv_lens[1], int(case.rows.q_starts[2])
        k = reference_attention.gather_kv(case.k_pool, case.rows.page_table[slot, :2], kv_len)
        v = torch.zeros_like(k)
        v[kv_len - 1] = 1.0
        weight = reference_attention.attend(case.q[end - 1 : end], k, v, 0.3, window)[0, :, 0]
        score = (case.q[end - 1] * k[kv_len - 1].repeat_interleave(2, dim=0)).sum(dim=1) * 0.3
        torch.testing.assert_close(weight, (score - lse[end - 1]).exp())


@pytest.mark.gpu
def test_decode_replays_in_a_graph_with_other_rows(device: torch.device) -> None:
    case = random_case(device, [random.randint(1, 2000) for _ in range(16)], None, group=5, head_dim=128)
    scale = 128**-0.5
    args = (case.q, case.k_pool, case.v_pool, case.rows, scale)
    paged_attention(*args)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = paged_attention(*args)
    for _ in range(3):
        order = torch.randperm(16, device=device)
        case.rows.slots.copy_(case.rows.slots[order])
        case.rows.kv_lens.copy_(case.rows.kv_lens[order])
        case.q.copy_(torch.randn_like(case.q))
        out.fill_(float("nan"))
        graph.replay()
        want, want_lse = reference_attention.paged_attention(*args)
        assert relative_error(out, want) < 1e-2
        torch.testing.assert_close(lse, want_lse, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 40])
def test_fixed_order_of_pieces_and_decode_rows(device: torch.device, window: int | None) -> None:
    """A token has the same bits in a whole prompt, in a piece of it and in a decode row; the interpreter rounds."""
    on_gpu = device.type == "cuda"
    shapes, dtypes = [(2, 128), (8, 64), (5, 96), (1, 256)], DTYPES
    if not on_gpu:
        shapes, dtypes = [(5, 64)], [random.choice(DTYPES)]
    for (group, head_dim), dtype in itertools.product(shapes, dtypes):
        num_tokens = 700 if on_gpu else 90
        case = random_case(device, [num_tokens], [num_tokens], group=group, head_dim=head_dim, dtype=dtype)
        sinks = torch.randn(case.q.shape[1], device=device)

        def attend(q: torch.Tensor, rows: PagedRows, case: Case = case, sinks: torch.Tensor = sinks) -> torch.Tensor:
            return paged_attention(q, case.k_pool, case.v_pool, rows, 0.1, window, sinks, fixed_order=True)[0]

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        def check(got: torch.Tensor, want: torch.Tensor) -> None:
            assert torch.equal(got, want) if on_gpu else relative_error(got, want) < 5e-3

        whole = attend(case.q, case.rows)
        twin = reference_attention.paged_attention(case.q, case.k_pool, case.v_pool, case.rows, 0.1, window, sinks)[0]
        assert relative_error(whole, twin) < 1e-2
        for _ in range(8 if on_gpu else 2):
            begin, end = sorted(random.sample(range(num_tokens + 1), 2))
            rows = case.rows._replace(
                kv_lens=ints(end), q_starts=ints(0, end - begin), max_q_len=random.choice([end - begin, num_tokens])
            )
            check(attend(case.q[begin:end], rows), whole[begin:end])
        positions = random.sample(range(num_tokens), 60 if on_gpu else 3)
        slots = case.rows.slots.expand(len(positions)).contiguous()
        decode = PagedRows(case.rows.page_table, slots, ints(*(position + 1 for position in positions)))
        check(attend(case.q[positions], decode), whole[positions])
