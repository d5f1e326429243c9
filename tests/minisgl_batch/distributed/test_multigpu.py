"""Collectives between GPUs and models over them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from minisgl_batch import LLM, SamplingParams
from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.errors import WorkerError
from minisgl_kernels import reference
from tests.minisgl_batch.distributed.rank_pool import RankPool
from tests.minisgl_batch.test_llm import MESSAGES, example_messages

pytestmark = pytest.mark.multigpu
NUM_ROWS = [1, 2, 3, 7, 64, 200, 256, 300, 1000, 4096]
Norms = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module", params=["pynccl", "torch.distributed"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(2, "cuda", use_pynccl=request.param == "pynccl")
    yield pool
    pool.close()


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.device("cuda", torch.cuda.current_device()))


def sums(tp: TPGroup, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tp.all_reduce(on_gpu(x[tp.rank])).cpu() for x in inputs]


def sums_of_products(tp: TPGroup, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Row-parallel products, as the layers compute them, of more and more rows."""
    assert tp.comm is not None
    tp.comm.prepare(len(x) * len(weight) * 2)
    mine_x, mine_w = (on_gpu(t.chunk(tp.size, dim=1)[tp.rank].contiguous()) for t in (x, weight))
    results = []
    for num_rows in (1, 100, 1000, len(x)):
        out = tp.buffer((num_rows, len(weight)), torch.bfloat16)
        product = (
            torch.mm(mine_x[:num_rows], mine_w.t()) if out is None else torch.mm(mine_x[:num_rows], mine_w.t(), out=out)
        )
        results.append(tp.all_reduce(product).cpu())
    return results


def norms(tp: TPGroup, inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Norms:
    """The norms and residual streams."""
    assert tp.comm is not None
    tp.comm.prepare(max(x[0].nbytes for x, _, _ in inputs))
    results = []
    for number, (x, stream, weight) in enumerate(inputs):
        residual, mine = on_gpu(stream), on_gpu(x[tp.rank])
        buffer = tp.buffer(mine.shape, mine.dtype)
        if number % 3 and buffer is not None:
            mine = buffer.copy_(mine)
        normed = tp.comm.add_rms_norm(mine, residual, on_gpu(weight), 1e-6)
        results.append((normed.cpu(), residual.cpu()))
    return results


def replays(tp: TPGroup, inputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sums of two sizes and a gathering in one graph, replayed for each input, (size, rows, columns)."""
    x = torch.zeros_like(on_gpu(inputs[0][tp.rank]))
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tp.all_reduce(x.clone()), tp.all_reduce(x[:1].clone()), tp.all_gather(x[:, 0].contiguous())

    with torch.cuda.stream(stream):
        run()
        graph.capture_begin()
        results = run()
        graph.capture_end()
        answers = []
        for given in inputs:
            x.copy_(given[tp.rank])
            graph.replay()
            answers.append(tuple(result.cpu() for result in results))
    return answers


def describe(tp: TPGroup) -> str:
    assert tp.comm is not None
    return tp.comm.describe()


def wait_for_nobody(tp: TPGroup, num_rows: int) -> float:
    """Rank 0's sums wait for rank 1, which doesn't come, until they are told so; the seconds that took."""
    if tp.rank == 1:
        return 0.0
    x = torch.ones((num_rows, 5120), dtype=torch.bfloat16, device="cuda")
    threading.Timer(1.0, tp.abort).start()
    started = time.monotonic()
    tp.all_reduce(x)
    torch.cuda.synchronize()
    return time.monotonic() - started


def test_all_means_are_used() -> None:
    pool = RankPool(2, "cuda")
    pool.run(sums_of_products, torch.zeros(4096, 8).bfloat16(), torch.zeros(5120, 8).bfloat16())
    (said, _) = pool.run(describe)
    pool.close()
    assert said.startswith("nccl ")
    assert "window 40 MiB" in said
    assert "one-shot to 4096 KiB" in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_all_sizes(ranks: RankPool, dtype: torch.dtype) -> None:
    inputs = [torch.randn(2, num_rows, 5120).to(dtype) for num_rows in NUM_ROWS]
    inputs += [torch.randn(2, 3, 5).to(dtype), torch.randn(2, 5121).to(dtype)]
    first, second = ranks.run(sums, inputs)
    for x, a, b in zip(inputs, first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, reference.all_reduce(list(x)))


def test_many_sums_in_a_row(ranks: RankPool) -> None:
    inputs = [torch.randn(2, 1 + i % 37, 512).bfloat16() for i in range(300)]
    first, second = ranks.run(sums, inputs)
    for x, a, b in zip(inputs, first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, reference.all_reduce(list(x)))


def test_products_are_summed_where_they_are_written(ranks: RankPool) -> None:
    x, weight = torch.randn(2000, 256).bfloat16(), torch.randn(5120, 256).bfloat16()
    first, second = ranks.run(sums_of_products, x, weight)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        want = x[: len(a)].float() @ weight.t().float()
        torch.testing.assert_close(a.float(), want, atol=0.5, rtol=0.02)


@pytest.mark.parametrize("size", [5120, 1024, 40, 16384])
def test_sums_are_added_and_normalised(ranks: RankPool, size: int) -> None:
    inputs = []
    for num_rows in (1, 2, 3, 127, 128, 129, 256, 390, 400, 1000):
        x, stream = torch.randn(2, num_rows, size).bfloat16(), torch.randn(num_rows, size).bfloat16()
        inputs.append((x, stream, torch.randn(size).bfloat16()))
    for results in ranks.run(norms, inputs):
        for (normed, stream), (x, residual, weight) in zip(results, inputs, strict=True):
            want, want_stream = reference.add_rms_norm(reference.all_reduce(list(x)), residual.clone(), weight, 1e-6)
            assert torch.equal(stream, want_stream)
            torch.testing.assert_close(normed, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_rows", [1, 16, 256, 900])
def test_graphs(ranks: RankPool, num_rows: int) -> None:
    inputs = [torch.randn(2, num_rows, 5120).bfloat16() for _ in range(20)]
    answers = ranks.run(replays, inputs)
    for number, x in enumerate(inputs):
        for total, first_row, gathered in (rank[number] for rank in answers):
            assert torch.equal(total, reference.all_reduce(list(x)))
            assert torch.equal(first_row, reference.all_reduce(list(x[:, :1])))
            assert torch.equal(gathered, x[:, :, 0])


@pytest.mark.parametrize("num_rows", [4, 2000], ids=["one-shot", "nccl"])
def test_sums_that_wait_for_a_rank_that_is_gone_can_be_ended(num_rows: int) -> None:
    pool = RankPool(2, "cuda")
    pool.run(sums, [torch.zeros(2, num_rows, 5120).bfloat16()])
    took_s, _ = pool.run(wait_for_nobody, num_rows)
    assert 0.9 < took_s < 10
    for process in pool._processes:
        process.kill()


@pytest.mark.parametrize("options", [{}, {"pynccl": False}, {"cuda_graph_max_bs": 0, "overlap": False}])
def test_answers_of_two_ranks(options: dict[str, object]) -> None:
    prompts = example_messages(60)
    answers = []
    for tp in (1, 2):
        with LLM("demo", seed=0, device="cuda", tp=tp, check_ranks=7, **options) as llm:  # type: ignore[arg-type]
            outputs = llm.chat(prompts, progress=False)
            sampled = llm.chat(prompts[:5], SamplingParams(temperature=0.7, top_p=0.9, n=2), progress=False)
            assert all(len(output.outputs) == 2 for output in sampled)
            answers.append([output.outputs[0].text for output in outputs])
    assert sum(a == b for a, b in zip(*answers, strict=True)) >= 55  # rounding differs


def norms_of_few_and_many(tp: TPGroup, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor) -> bool:
    """In a fixed order: whether rows get the same bits by themselves as among 1,000 others."""
    assert tp.comm is not None
    assert tp.comm.fix_order(x.dtype)

    def norm(rows: slice) -> torch.Tensor:
        return tp.comm.add_rms_norm(on_gpu(x[tp.rank][rows]), on_gpu(stream[rows]), on_gpu(weight), 1e-6)

    whole = norm(slice(None))
    return all(torch.equal(norm(slice(n)), whole[:n]) for n in (1, 2, 64, 300, 700))


def test_fixed_order() -> None:
    pool = RankPool(2, "cuda")
    x, stream = torch.randn(2, 1000, 5120).bfloat16(), torch.randn(1000, 5120).bfloat16()
    assert all(pool.run(norms_of_few_and_many, x, stream, torch.randn(5120).bfloat16()))
    pool.close()
    prompts = example_messages(60)
    with LLM("demo", device="cuda", tp=2, batch_invariant=True) as llm:
        together = [output.outputs[0].token_ids for output in llm.chat(prompts, progress=False)]
        for prompt, ids in list(zip(prompts, together, strict=True))[::10]:
            assert llm.chat([prompt], progress=False)[0].outputs[0].token_ids == ids


def test_a_follower_that_dies_is_named() -> None:
    with LLM("demo", device="cuda", tp=2) as llm:
        assert llm._engine._followers is not None
        (child,) = llm._engine._followers._children
        stream = llm.stream([MESSAGES] * 4, SamplingParams(max_tokens=2000, ignore_eos=True))
        next(stream)
        os.kill(child.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - started < 15
