"""FlashInfer's two decode kernels over ragged rows, by page size: which to choose, and how near they are to memory.

    python -m tests.bench.decode_attention

Prints a JSON line per case: microseconds of a graph replay and the bytes of KV it reads per second.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from minisgl_batch.attention.base import AttnHeads, AttnSpec
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.fi import FlashInferDecode
from minisgl_batch.engine.transfer import CudaTransfer
from minisgl_batch.kvcache.mha_pool import MHAKVCache

MAX_LEN = 2048
LAYERS = 4  # read in turn, so that a replay doesn't find its KV in the cache
ROWS = ((256, 200, 1100), (128, 700, 1500), (48, 1000, 1900))  # (rows, shortest, longest): a batch that runs dry


def measure(heads: AttnHeads, page_size: int, num_rows: int, lens: list[int], tensor_cores: bool) -> float:
    """Microseconds of one layer."""
    device = torch.device("cuda")
    max_pages = MAX_LEN // page_size
    pool = MHAKVCache(
        num_layers=LAYERS,
        num_pages=num_rows * max_pages,
        page_size=page_size,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=torch.bfloat16,
        device=device,
    )
    table = torch.randperm(num_rows * max_pages, device=device).int().view(num_rows, max_pages)
    transfer = CudaTransfer(device, 1 << 18, num_rows)
    buffers = DecodeBuffers(num_rows, max_pages, 1, page_size, num_rows, device, transfer.upload_into)
    part = FlashInferDecode(pool, heads, buffers, use_tensor_cores=tensor_cores)
    part.make_ready(num_rows)
    kv_lens = np.array(sorted(lens, reverse=True), dtype=np.int32)
    pages = -(-kv_lens // page_size)
    indptr = np.append(0, np.cumsum(pages)).astype(np.int32)
    buffers.indptr.copy_(torch.from_numpy(indptr))
    buffers.last_page_lens.copy_(torch.from_numpy((kv_lens - 1) % page_size + 1))
    listed = torch.cat([table[i, :n] for i, n in enumerate(pages.tolist())])
    buffers.pages[: len(listed)] = listed
    q = torch.randn(num_rows, heads.num_heads, heads.head_dim, device=device, dtype=torch.bfloat16)
    spec = AttnSpec(heads.scale)
    prepared = part.prepare(num_rows, indptr, kv_lens)

    def run() -> None:
        for layer in range(LAYERS):
            part.forward(q, layer, spec, prepared)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        part.prepare(num_rows, indptr, kv_lens)
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 20 / LAYERS * 1000


def lines() -> Iterator[dict[str, Any]]:
    random.seed(0)
    for name, num_heads in (("16/8", 16), ("40/8", 40)):
        heads = AttnHeads(num_heads, 8, 128, 128**-0.5)
        for num_rows, low, high in ROWS:
            lens = [random.randint(low, high) for _ in range(num_rows)]
            for page_size in (16, 32, 64, 128):
                for tensor_cores in (False, True):
                    if num_heads == 40 and not tensor_cores:
                        continue
                    us = measure(heads, page_size, num_rows, lens, tensor_cores)
                    yield {
                        "heads": name,
                        "rows": num_rows,
                        "tokens": sum(lens),
                        "page_size": page_size,
                        "tensor_cores": tensor_cores,
                        "us": round(us, 1),
                        "tb_per_s": round(sum(lens) * 2 * 8 * 128 * 2 / us / 1e6, 2),
                    }


def main() -> None:
    for line in lines():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
