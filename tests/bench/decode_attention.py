"""Decode attention by kernel over ragged rows, and what two levels save over a shared prefix.

    python -m tests.bench.decode_attention

Prints a JSON line per case: microseconds of a layer in a graph replay; over ragged rows, also the bytes of KV that it
reads per second.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from minisgl_batch.attention.base import AttnHeads, AttnSpec
from minisgl_batch.attention.cuda import CudaDecode
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.fi import FlashInferDecode
from minisgl_batch.attention.parts import DecodePart, OwnPagesPart
from minisgl_batch.attention.two_level import TwoLevelDecode
from minisgl_batch.attention.widened import WidenedLayer
from minisgl_batch.batch import NO_EDITS, IntArray, ScheduledBatch, SharedPrefixes
from minisgl_batch.engine.transfer import CudaTransfer
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_kernels.e4m3 import E4M3

LAYERS = 4  # read in turn, so that a replay doesn't find its KV in the cache
OWN_TOKENS = 288  # behind shared prefixes
HEADS = {"16/8": AttnHeads(16, 8, 128, 128**-0.5), "40/8": AttnHeads(40, 8, 128, 128**-0.5)}
ROWS = ((256, 200, 1100), (128, 700, 1500), (48, 1000, 1900), (8, 1000, 1900))  # (rows, shortest, longest)
KERNELS = ("ours", "ours, fp8 KV", "FlashInfer on CUDA cores", "FlashInfer on tensor cores")


class Layers:
    """A pool of some layers, rows in decode buffers, and the kernel under test.

    Args:
        lens: tokens of each row.
        shared_pages: of one prefix that all rows share.
    """

    def __init__(self, kernel: str, heads: AttnHeads, page_size: int, lens: list[int], shared_pages: int = 0) -> None:
        device, num_rows = torch.device("cuda"), len(lens)
        self.max_pages = -(-max(lens) // page_size)
        self.pool = MHAKVCache(
            num_layers=LAYERS,
            num_pages=num_rows * self.max_pages,
            page_size=page_size,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=E4M3 if kernel.endswith("fp8 KV") else torch.bfloat16,
            device=device,
        )
        self.widened = WidenedLayer(self.pool, torch.bfloat16) if self.pool.dtype == E4M3 else None
        self.table = torch.randperm(num_rows * self.max_pages, device=device).int().view(num_rows, self.max_pages)
        self.table[:, :shared_pages] = self.table[0, :shared_pages].clone()
        self.tokens = torch.zeros((num_rows, max(lens) + 1), dtype=torch.int32, device=device)
        upload_into = CudaTransfer(device, 1 << 20, num_rows).upload_into
        self.buffers = DecodeBuffers(num_rows, self.max_pages, 1, page_size, num_rows - 1, device, upload_into)
        self.own: OwnPagesPart = (
            CudaDecode(self.pool, heads, self.buffers)
            if kernel.startswith("ours")
            else FlashInferDecode(self.pool, heads, self.buffers, use_tensor_cores="tensor" in kernel)
        )
        self.heads, self.lens, self.shared_pages = heads, np.array(lens, np.int32), shared_pages

    def us(self, *, two_levels: bool = False) -> float:
        """Median microseconds of a layer."""
        two_level = TwoLevelDecode(self.pool, self.heads, self.own, self.buffers, self.widened)
        part = two_level if two_levels else self.own
        num_rows = len(self.lens)
        part.make_ready(num_rows)
        indptr, kv_lens = self.buffers.fill(self._batch(two_levels), num_rows)
        q = torch.randn(num_rows, self.heads.num_heads, 128, device="cuda", dtype=torch.bfloat16)
        prepared = part.prepare(num_rows, indptr, kv_lens)
        self.buffers.derive(num_rows, self.table, self.tokens)
        torch.cuda.synchronize()
        return _replay(part, q, AttnSpec(self.heads.scale), prepared, lambda: part.prepare(num_rows, indptr, kv_lens))

    def _batch(self, two_levels: bool) -> ScheduledBatch:
        num_rows = len(self.lens)
        ones: IntArray = np.ones(num_rows, np.int32)
        prefix = self.table[0, : self.shared_pages].cpu().numpy()
        shared = SharedPrefixes(np.array([num_rows], np.int32), np.array([len(prefix)], np.int32), prefix, version=1)
        return ScheduledBatch(
            slots=np.arange(num_rows, dtype=np.int32),
            q_lens=ones,
            kv_lens=self.lens,
            num_decode=num_rows,
            new_pages=-ones,
            samples=ones.astype(np.bool_),
            any_filter=False,
            edits=NO_EDITS,
            shared=shared if two_levels else None,
        )


def _replay(part: DecodePart, q: torch.Tensor, spec: AttnSpec, prepared: Any, plan: Any) -> float:
    def run() -> None:
        for layer in range(LAYERS):
            part.forward(q, layer, spec, prepared)

    stream, times = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        plan()
        for _ in range(25):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] / LAYERS * 1000


def ragged_lines() -> Iterator[dict[str, Any]]:
    random.seed(0)
    for name, heads in HEADS.items():
        for num_rows, low, high in ROWS:
            lens = sorted((random.randint(low, high) for _ in range(num_rows)), reverse=True)
            for page_size in (16, 64):
                for kernel in KERNELS:
                    if name == "40/8" and kernel.endswith("CUDA cores"):
                        continue
                    layers = Layers(kernel, heads, page_size, lens)
                    us = layers.us()
                    yield {
                        "heads": name,
                        "rows": num_rows,
                        "tokens": sum(lens),
                        "page_size": page_size,
                        "kernel": kernel,
                        "us": round(us, 1),
                        "tb_per_s": round(sum(lens) * 2 * 8 * 128 * layers.pool.dtype.itemsize / us / 1e6, 2),
                    }


def shared_lines() -> Iterator[dict[str, Any]]:
    for name, heads in HEADS.items():
        for num_rows in (64, 256):
            for prefix in (256, 512, 2048):
                lens = [prefix + OWN_TOKENS + random.randint(-100, 100) for _ in range(num_rows)]
                for kernel in (*KERNELS[:2], KERNELS[2] if name == "16/8" else KERNELS[3]):
                    layers = Layers(kernel, heads, 16, lens, prefix // 16)
                    yield {
                        "heads": name,
                        "rows": num_rows,
                        "shared_tokens": prefix,
                        "kernel": kernel,
                        "one_level_us": round(layers.us(), 1),
                        "two_level_us": round(layers.us(two_levels=True), 1),
                    }


def main() -> None:
    for lines in (ragged_lines, shared_lines):
        for line in lines():
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
