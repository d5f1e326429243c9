"""Every attention backend against attention row by row: ragged rows, cached prefixes, shared prefixes, graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl_batch.attention import registry
from minisgl_batch.attention.base import AttnHeads, GraphBackend
from minisgl_batch.attention.registry import AttnShapes, resolve_backend
from minisgl_batch.batch import ForwardBatch
from minisgl_batch.errors import InvalidParameterError
from minisgl_kernels.e4m3 import E4M3
from tests.minisgl_batch.attention.steps import PagedCase, random_rows, relative_error

GPU_BACKENDS = ["fa,cuda", "fa,fi", "fi", "fa", "triton"]
gpu = pytest.mark.gpu
TWO_LEVEL_CASES = [("fa,cuda", None), ("fa,fi", None), ("fa,cuda", E4M3)]
SHAPES = AttnShapes(torch.bfloat16, group=2, head_dim=128, page_size=16)


def heads_of(group: int, head_dim: int, num_kv_heads: int = 2) -> AttnHeads:
    return AttnHeads(num_kv_heads * group, num_kv_heads, head_dim, head_dim**-0.5)


def case(
    name: str, group: int, head_dim: int, page_size: int, max_kv_len: int = 700, kv_dtype: torch.dtype | None = None
) -> PagedCase:
    if name == "fa,cuda" and page_size == 1:
        pytest.skip("reads tiles of 16 tokens")
    dtype, device = (torch.float32, "cpu") if name == "torch" else (torch.bfloat16, "cuda")
    return PagedCase(
        name, heads_of(group, head_dim), page_size, max_kv_len, dtype, torch.device(device), kv_dtype=kv_dtype
    )


def steps_of(paged: PagedCase) -> None:
    paged.check(random_rows(20, 0, paged.max_kv_len), num_decode=20)
    paged.check(random_rows(0, 9, paged.max_kv_len), num_decode=0)
    paged.check(random_rows(7, 5, paged.max_kv_len), num_decode=7)
    paged.check([(3, 1, 1)], num_decode=1)
    paged.check([(3, 1, 1)], num_decode=0)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["", "e4m3"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 3])
def test_torch_backend(group: int, page_size: int, kv_dtype: torch.dtype | None) -> None:
    steps_of(case("torch", group, 8, page_size, max_kv_len=50, kv_dtype=kv_dtype))


@gpu
@pytest.mark.parametrize("name", GPU_BACKENDS)
@pytest.mark.parametrize(("group", "head_dim", "page_size"), [(2, 128, 16), (5, 128, 16), (4, 128, 1), (8, 64, 64)])
def test_gpu_backend(name: str, group: int, head_dim: int, page_size: int) -> None:
    steps_of(case(name, group, head_dim, page_size))


@gpu
@pytest.mark.parametrize("name", ["fa,cuda", "fa", "triton"])
@pytest.mark.parametrize(("window", "with_sinks"), [(None, True), (1, False), (128, True)])
@pytest.mark.parametrize(("group", "head_dim", "page_size"), [(2, 128, 16), (8, 64, 64)])
def test_windows_and_sinks(
    name: str, group: int, head_dim: int, page_size: int, window: int | None, with_sinks: bool
) -> None:
    heads, device = heads_of(group, head_dim), torch.device("cuda")
    steps_of(PagedCase(name, heads, page_size, 700, torch.bfloat16, device, window, with_sinks))


@gpu
@pytest.mark.parametrize("name", ["fa,cuda", "triton"])
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (100, True)])
@pytest.mark.parametrize(("group", "head_dim", "page_size"), [(2, 128, 16), (5, 128, 32), (8, 64, 64)])
def test_e4m3_pools(name: str, group: int, head_dim: int, page_size: int, window: int | None, with_sinks: bool) -> None:
    heads, device = heads_of(group, head_dim), torch.device("cuda")
    steps_of(PagedCase(name, heads, page_size, 700, torch.bfloat16, device, window, with_sinks, E4M3))


@gpu
@pytest.mark.full
@pytest.mark.parametrize("name", GPU_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
def test_gpu_backend_matrix(name: str, group: int, head_dim: int, page_size: int) -> None:
    steps_of(case(name, group, head_dim, page_size))


@gpu
@pytest.mark.parametrize(("name", "kv_dtype"), TWO_LEVEL_CASES)
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("groups", [[(30, 20)], [(9, 3), (12, 30), (2, 1)], [(2, 1), (2, 2), (2, 3), (2, 4)]])
def test_two_levels_give_what_one_gives(
    name: str, kv_dtype: torch.dtype | None, group: int, groups: list[tuple[int, int]]
) -> None:
    paged = case(name, group, 128, 16, kv_dtype=kv_dtype)
    shared = paged.share_prefixes(groups)
    rows = []
    for num_rows, num_pages in groups:
        rows += [(len(rows) + i, 1, random.randint(num_pages * 16 + 1, 700)) for i in range(num_rows)]
    rows += [(slot, 1, random.randint(1, 700)) for slot in range(len(rows), len(rows) + 5)]
    paged.check(rows, num_decode=len(rows), shared=shared)
    paged.check(rows, num_decode=len(rows))


@gpu
@pytest.mark.parametrize("window", [None, 100])
def test_two_levels_with_sinks(window: int | None) -> None:
    heads, device = heads_of(8, 64), torch.device("cuda")
    paged = PagedCase("fa,cuda", heads, 16, 700, torch.bfloat16, device, window, with_sinks=True)
    shared = paged.share_prefixes([(9, 3), (12, 30), (2, 1)])
    least = [49] * 9 + [481] * 12 + [17] * 2 + [1] * 5
    rows = [(slot, 1, random.randint(kv_len, 700)) for slot, kv_len in enumerate(least)]
    paged.check(rows, num_decode=len(rows), shared=shared)
    paged.check(rows, num_decode=len(rows))


@gpu
@pytest.mark.parametrize(("name", "kv_dtype"), TWO_LEVEL_CASES)
@pytest.mark.parametrize("shared", [False, True], ids=["one level", "two levels"])
@pytest.mark.parametrize(("group", "window"), [(2, None), (5, None), (2, 60)])
def test_graph_follows_rows_and_groups(
    name: str, kv_dtype: torch.dtype | None, group: int, window: int | None, shared: bool
) -> None:
    """One captured step serves other rows, lengths and groups, with padding rows behind them."""
    if window is not None and name != "fa,cuda":
        pytest.skip("has no windows")
    heads, device = heads_of(group, 128), torch.device("cuda")
    paged = PagedCase(name, heads, 16, 700, torch.bfloat16, device, window, kv_dtype=kv_dtype)
    backend, buffers, size = paged.backend, paged.buffers, 40
    assert isinstance(backend, GraphBackend)
    assert buffers is not None
    q = paged.queries(size)
    captured = ForwardBatch(**dict.fromkeys(ForwardBatch.__slots__))  # type: ignore[arg-type]
    captured.attention = backend.prepare_capture(size, shared=shared)

    def run() -> torch.Tensor:
        buffers.derive(size, paged.page_table, paged.token_pool)
        return backend.forward(q, 0, paged.spec, captured)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for num_rows in (40, 33, 35):
            groups = [(random.randint(2, 14), random.randint(1, 20)) for _ in range(2)]
            prefixes = paged.share_prefixes(groups) if shared else None
            least = [num_pages * 16 + 1 for n, num_pages in groups for _ in range(n)] if shared else []
            least += [1] * (num_rows - len(least))
            rows = [(slot, 1, random.randint(kv_len, 700)) for slot, kv_len in enumerate(least)]
            q.normal_()
            backend.prepare_replay(paged.batch(rows, num_rows, prefixes).host, size)
            graph.replay()
            stream.synchronize()
            assert relative_error(out[:num_rows], paged.expected(q[:num_rows], rows, window)) < 1e-2
            assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", ["magic", "fa,cuda", "fa,fi", "triton", "fa,magic"])
def test_backend_that_cannot_run_here_is_named(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=name):
        resolve_backend(name, torch.device("cpu"), SHAPES)


@pytest.mark.parametrize(
    ("changes", "missing", "name"),
    [
        ({}, None, "fa,cuda"),
        ({"head_dim": 64}, None, "fa,cuda"),
        ({"head_dim": 96}, None, "triton"),
        ({"head_dim": 256}, None, "triton"),
        ({"has_window": True}, None, "fa,cuda"),
        ({"has_window": True}, "nvcc", "triton"),
        ({"has_window": True}, "flash-attn", "triton"),
        ({"has_window": True, "head_dim": 256}, None, "triton"),
        ({"has_sinks": True}, None, "fa,cuda"),
        ({"has_sinks": True}, "nvcc", "triton"),
        ({"dtype": torch.float32}, None, "triton"),
        ({"kv_is_fp8": True}, None, "fa,cuda"),
        ({"kv_is_fp8": True}, "nvcc", "triton"),
        ({}, "nvcc", "fa,fi"),
        ({}, "flash-attn", "fi"),
        ({"head_dim": 256}, "flash-attn", "triton"),
        ({}, "FlashInfer and nvcc", "triton"),
    ],
)
def test_auto_chooses_what_can_run_the_model(
    changes: dict[str, Any], missing: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = missing or ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(registry, "installed_generation", lambda: None if "flash-attn" in missing else 4)
    monkeypatch.setattr(registry, "find_spec", lambda _: None if "FlashInfer" in missing else object())
    monkeypatch.setattr(registry, "can_run", lambda *_: "nvcc" not in missing)
    assert resolve_backend("auto", torch.device("cuda"), replace(SHAPES, **changes)) == name


@pytest.mark.parametrize(("key", "words"), [("has_window", "sliding windows"), ("has_sinks", "attention sinks")])
def test_what_a_backend_does_not_serve_is_refused(key: str, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"'fa,fi' runs no models with {words}; triton does"):
        resolve_backend("fa,fi", torch.device("cuda"), replace(SHAPES, **{key: True}))


def test_float32_is_refused_where_it_is_not_computed() -> None:
    with pytest.raises(InvalidParameterError, match="'fi' doesn't compute in float32; triton does"):
        resolve_backend("fi", torch.device("cuda"), replace(SHAPES, dtype=torch.float32))


def test_fp8_kv_caches_are_refused_where_they_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = replace(SHAPES, kv_is_fp8=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(InvalidParameterError, match="'fi' reads no fp8 KV cache; triton and fa,cuda do"):
        resolve_backend("fi", torch.device("cuda"), shapes)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(InvalidParameterError, match="kv_cache_dtype: fp8 needs"):
        resolve_backend("auto", torch.device("cuda"), shapes)
