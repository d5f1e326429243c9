"""Processes that form a tensor-parallel group and run what a test or a bench sends them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from minisgl_batch.distributed.join import join_group
from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.distributed.rendezvous import open_store

DEADLINE_S = 120


class RankPool:
    """`size` ranks, each a process that waits for functions to call with its TPGroup.

    A rank that doesn't come back from a function says where it is, and ends.

    Args:
        device: "cpu", or "cuda" for a GPU each.
        use_pynccl: as in `join_group`.
    """

    def __init__(self, size: int, device: str = "cpu", *, use_pynccl: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meet = f"file://{Path(self._folder.name) / 'meet'}"
        # Ranks fork from a process that has imported torch, once for all pools; what CUDA holds doesn't survive a fork.
        context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        context.set_forkserver_preload([__name__, "minisgl_batch.scheduler.factory"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = RankPlace(rank=rank, size=size, meet=meet, num_local=size)
            process = context.Process(target=_serve, args=(theirs, place, device, use_pynccl), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(tp, *args)` of all ranks, by rank. The function must be importable by name."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                raise TimeoutError(f"rank {rank} didn't answer {function.__name__} within {DEADLINE_S} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise RuntimeError(f"rank {rank} ended in {function.__name__}") from None
        failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(DEADLINE_S)
            process.kill()
        self._folder.cleanup()


def _serve(pipe: Connection, place: RankPlace, kind: str, use_pynccl: bool) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, place.rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    tp = join_group(place, open_store(place), device, use_pynccl=use_pynccl)
    while (call := pipe.recv()) is not None:
        function, args = call
        faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
        try:
            pipe.send((True, function(tp, *args)))
        except Exception:  # noqa: BLE001 - the test reports it
            pipe.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    tp.close()
