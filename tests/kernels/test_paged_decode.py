"""Our decode attention on page lists, on a GPU and in the emulator, against its twin in float32."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from minisgl_kernels import cuda, reference, reference_attention
from minisgl_kernels.decode_inputs import PageLists
from minisgl_kernels.e4m3 import E4M3
from minisgl_kernels.paged_decode import make_workspace, paged_decode
from minisgl_kernels.widen_pages import widen_pages
from tests.kernels.emulation import emulate
from tests.kernels.errors import relative_error


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "emulator":
        emulate(monkeypatch)
        return torch.device("cpu")
    if cuda.layer_kernels(torch.empty(0, dtype=torch.bfloat16, device="cuda")) is None:
        pytest.skip("needs a Hopper GPU, nvcc, ninja and tvm-ffi")
    return torch.device("cuda")


def check(
    device: torch.device,
    kv_lens: list[int],
    *,
    group: int,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    page_size: int = 16,
    num_workers: int | None = None,
    with_prefix: bool = False,
    window: int | None = None,
    with_sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Rows of random pages; whatever no row may read is NaN. Twice, since a call leaves its workspace as it was."""
    num_rows, num_pages = len(kv_lens), [-(-n // page_size) for n in kv_lens]
    total = sum(num_pages)
    pools = torch.full((2, total + 3, page_size, num_kv_heads, head_dim), float("nan"))
    pages = torch.randperm(total + 3)[:total].int()
    starts = [0, *accumulate(num_pages)]
    for start, kv_len in zip(starts[:-1], kv_lens, strict=True):
        for number in range(-(-kv_len // page_size)):
            rest = min(page_size, kv_len - number * page_size)
            pools[:, int(pages[start + number]), :rest] = torch.randn(2, rest, num_kv_heads, head_dim)
    k_pool, v_pool = pools.to(kv_dtype or dtype).to(device)
    lists = PageLists(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        pages.to(device),
        torch.tensor([(n - 1) % page_size + 1 for n in kv_lens], dtype=torch.int32, device=device),
    )
    num_heads, scale = num_kv_heads * group, head_dim**-0.5
    workspace = make_workspace(num_rows, num_heads, num_kv_heads, head_dim, device, num_workers)
    sinks = 4.0 + 2.0 * torch.randn(num_heads, device=device) if with_sinks else None  # about a few hundred keys
    for _ in range(2):
        q = torch.randn(num_rows, num_heads, head_dim).to(dtype).to(device)
        prefix = wide_prefix = None
        if with_prefix:
            prefix_out, prefix_lse = torch.randn_like(q), torch.randn(num_heads, num_rows, device=device) * 3
            prefix_out[0], prefix_lse[:, 0] = float("nan"), random.choice([float("inf"), float("-inf")])
            prefix, wide_prefix = (prefix_out, prefix_lse), (prefix_out.float(), prefix_lse)
        torch.cuda.synchronize() if device.type == "cuda" else None
        got = paged_decode(q, k_pool, v_pool, lists, scale, workspace, prefix, window, sinks)
        wide = (q.float(), k_pool.float(), v_pool.float())
        want = reference_attention.paged_decode(*wide, lists, scale, wide_prefix, window, sinks)
        assert relative_error(got, want) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
        assert max(map(relative_error, got, want)) < 1e-2
        assert not workspace.arrivals.any()


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["", "e4m3"])
@pytest.mark.parametrize("with_prefix", [False, True], ids=["own", "behind a prefix"])
@pytest.mark.parametrize(("group", "head_dim", "page_size"), [(1, 64, 16), (2, 128, 16), (5, 128, 32), (8, 64, 64)])
def test_rows_of_any_length(
    device: torch.device, group: int, head_dim: int, page_size: int, with_prefix: bool, kv_dtype: torch.dtype | None
) -> None:
    lens = [random.randint(1, 400) for _ in range(4)]
    if device.type == "cuda":
        lens = [random.randint(1, 3000) for _ in range(random.choice([1, 8, 77, 256]))]
    # On a CPU few workers, so that rows begin and end anywhere in a share.
    workers = random.randint(2, 12) if device.type == "cpu" else None
    options = {"group": group, "head_dim": head_dim, "page_size": page_size, "num_workers": workers}
    check(device, lens, with_prefix=with_prefix, kv_dtype=kv_dtype, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_lens", [[1], [16], [17], [500], [1, 1, 1, 1, 600, 1, 1], [160] * 4])
def test_rows_and_shares_that_meet_at_their_ends(device: torch.device, kv_lens: list[int]) -> None:
    check(device, kv_lens, group=2, num_kv_heads=1, num_workers=4)


def test_heads_that_do_not_divide_the_workers(device: torch.device) -> None:
    check(device, [300, 170], group=3, num_kv_heads=3, head_dim=64, num_workers=8)


@pytest.mark.parametrize("with_prefix", [False, True])
def test_rows_that_many_shares_hold(device: torch.device, with_prefix: bool) -> None:
    group = random.choice([3, 7])
    check(
        device, [20, random.randint(1500, 1700)], group=group, num_kv_heads=1, num_workers=12, with_prefix=with_prefix
    )


@pytest.mark.parametrize(("group", "with_prefix"), [(1, True), (3, False), (8, True)])
def test_sinks_count_once(device: torch.device, group: int, with_prefix: bool) -> None:
    """In rows of one tile, of one share and of many; few queries of a KV head are put together otherwise."""
    lens = [1, random.randint(2, 40), random.randint(900, 1200)]
    options = {"group": group, "head_dim": 64, "num_workers": 10, "with_prefix": with_prefix}
    check(device, lens, with_sinks=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("window", "page_size"), [(1, 16), (16, 16), (37, 16), (100, 64)])
def test_windows(device: torch.device, window: int, page_size: int, with_sinks: bool) -> None:
    """Lists of more pages than the window needs, too."""
    lens = [window, window + 1, random.randint(1, 300), random.randint(300, 500)]
    check(device, lens, group=4, head_dim=64, page_size=page_size, window=window, with_sinks=with_sinks, num_workers=6)


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads", [1, 4, 8, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["", "e4m3"])
def test_many_heads_and_long_rows(num_kv_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    device = torch.device("cuda")
    lens = [random.randint(1, 2000) for _ in range(130)]
    check(device, lens, group=2, num_kv_heads=num_kv_heads, dtype=dtype, kv_dtype=kv_dtype)
    check(device, [20_000, 3], group=2, num_kv_heads=num_kv_heads, dtype=dtype, kv_dtype=kv_dtype)


def test_on_a_cpu_the_twin_runs() -> None:
    check(torch.device("cpu"), [3, 50], group=2, num_workers=4, with_prefix=True)


def test_pages_are_widened_once_each(device: torch.device) -> None:
    sizes = (11, 16, random.choice([1, 3]), 64) if device.type == "cpu" else (3000, 16, 8, 128)
    k_pool, v_pool = (torch.randn(2, *sizes, device=device) * 30).to(E4M3)
    k_pool[0] = torch.nan
    wanted = torch.randint(0, sizes[0], (3 * sizes[0],), dtype=torch.int32, device=device).sort().values
    wanted = torch.cat([wanted, wanted[:3], torch.zeros(40, dtype=torch.int32, device=device)])
    got, want = torch.full((2, 2, *sizes), 7.0, device=device).bfloat16()
    reference.widen_pages(k_pool, v_pool, wanted, *want)
    widen_pages(k_pool, v_pool, wanted, *got)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
