"""The triton backend against the torch one: mixed steps, and decode steps as graphs replay them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from minisgl_batch.attention.base import AttnSpec
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.torch import TorchAttention
from minisgl_batch.attention.triton import TritonAttention
from minisgl_batch.batch import NO_EDITS, ForwardBatch, IntArray, ScheduledBatch
from minisgl_batch.kvcache.mha_pool import MHAKVCache

NUM_SLOTS, MAX_PAGES, PAGE_SIZE = 9, 6, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class World:
    """A pool of random keys and values, a page table over it, and both backends."""

    def __init__(self, device: torch.device) -> None:
        num_pages = NUM_SLOTS * MAX_PAGES
        self.pool = MHAKVCache(
            num_layers=2,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=2,
            head_dim=64,
            dtype=torch.float32,
            device=device,
        )
        for layer in range(2):
            self.pool.k(layer).normal_()
            self.pool.v(layer).normal_()
        pages = torch.randperm(num_pages, dtype=torch.int32).view(NUM_SLOTS, MAX_PAGES)
        dummy_line = torch.full((1, MAX_PAGES), self.pool.dummy_page, dtype=torch.int32)
        self.page_table = torch.cat([pages, dummy_line]).to(device)
        self.device = device
        self.buffers = DecodeBuffers(
            max_rows=8,
            max_pages=MAX_PAGES,
            max_groups=2,
            page_size=PAGE_SIZE,
            dummy_slot=NUM_SLOTS,
            device=device,
            upload_into=lambda target, arrays: target[: sum(map(len, arrays))].copy_(self.send(np.concatenate(arrays))),
        )
        self.triton = TritonAttention(self.pool, self.buffers)
        self.torch = TorchAttention(self.pool)

    def send(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def step(self, num_decode: int, num_extend: int) -> ScheduledBatch:
        num_rows = num_decode + num_extend
        kv_lens = np.random.randint(1, MAX_PAGES * PAGE_SIZE + 1, num_rows).astype(np.int32)
        q_lens = np.ones(num_rows, dtype=np.int32)
        q_lens[num_decode:] = [random.choice([n, random.randint(1, n)]) for n in kv_lens[num_decode:]]
        return ScheduledBatch(
            slots=np.random.permutation(NUM_SLOTS)[:num_rows].astype(np.int32),
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_decode=num_decode,
            new_pages=np.full(num_decode, -1, dtype=np.int32),
            samples=np.ones(num_rows, dtype=np.bool_),
            all_greedy=True,
            any_filter=False,
            edits=NO_EDITS,
        )

    def batch(self, host: ScheduledBatch, slots: torch.Tensor, kv_lens: torch.Tensor) -> ForwardBatch:
        """What attention backends read of a step."""
        nothing = self.buffers.slots[:0]
        q_starts = self.send(np.append(0, host.q_lens.cumsum()).astype(np.int32))
        return ForwardBatch(
            host=host,
            input_ids=nothing,
            positions=nothing,
            out_loc=nothing,
            slots=slots,
            kv_lens=kv_lens,
            q_starts=q_starts,
            page_table=self.page_table,
            token_pool=nothing,
            sample_tokens=nothing,
        )

    def queries(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, 10, 64, device=self.device)


def assert_equal(
    world: World, got: torch.Tensor, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch
) -> None:
    world.torch.prepare_metadata(batch)
    torch.testing.assert_close(got, world.torch.forward(q, layer, spec, batch), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("num_decode", "num_extend"), [(5, 0), (0, 4), (3, 4)])
@pytest.mark.parametrize("device", DEVICES)
def test_steps(device: str, num_decode: int, num_extend: int, window: int | None) -> None:
    world, spec = World(torch.device(device)), AttnSpec(scale=0.2, window=window)
    host = world.step(num_decode, num_extend)
    batch = world.batch(host, world.send(host.slots), world.send(host.kv_lens))
    world.triton.prepare_metadata(batch)
    q, layer = world.queries(host.num_tokens), random.randrange(2)
    got = world.triton.forward(q, layer, spec, batch)
    assert got.is_contiguous()
    assert_equal(world, got, q, layer, spec, batch)


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_step_follows_the_buffers(device: str) -> None:
    """Captured with padding alone, replayed with rows and padding behind them."""
    world, spec, size = World(torch.device(device)), AttnSpec(scale=0.2), 8
    buffers, q = world.buffers, world.queries(size)
    padding = world.step(size, 0)
    captured = world.batch(padding, buffers.slots[:size], buffers.kv_lens[:size])
    captured.attention = world.triton.prepare_capture(size, shared=False)
    forward = Replayed(world, q, spec, captured)
    for num_rows in (5, 8, 1):
        host = world.step(num_rows, 0)
        world.triton.prepare_replay(host, size)
        got = forward()[:num_rows]
        batch = world.batch(host, world.send(host.slots), world.send(host.kv_lens))
        assert_equal(world, got, q[:num_rows], 0, spec, batch)


class Replayed:
    """A forward call: from a CUDA graph on a GPU, called again on a CPU."""

    def __init__(self, world: World, q: torch.Tensor, spec: AttnSpec, batch: ForwardBatch) -> None:
        self._call = lambda: world.triton.forward(q, 0, spec, batch)
        self._graph = None
        if world.device.type == "cuda":
            self._call()  # compiles
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = self._call()

    def __call__(self) -> torch.Tensor:
        if self._graph is None:
            return self._call()
        self._graph.replay()
        return self._out
