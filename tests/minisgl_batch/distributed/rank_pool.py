"""Processes that form a tensor-parallel group over gloo and run what a test sends them."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.distributed.rendezvous import open_store
from minisgl_batch.distributed.torch_comm import join_group

DEADLINE_S = 120


class RankPool:
    """`size` ranks, each a process that waits for functions to call with its TPGroup."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meet = f"file://{Path(self._folder.name) / 'meet'}"
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = RankPlace(rank=rank, size=size, meet=meet, num_local=size)
            process = context.Process(target=_serve, args=(theirs, place), daemon=True)
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
            answers.append(pipe.recv())
        failures = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if not answer[0]]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(DEADLINE_S)
        self._folder.cleanup()


def _serve(pipe: Connection, place: RankPlace) -> None:
    torch.set_num_threads(1)
    tp = join_group(place, open_store(place))
    while (call := pipe.recv()) is not None:
        function, args = call
        try:
            pipe.send((True, function(tp, *args)))
        except Exception:  # noqa: BLE001 - the test reports it
            pipe.send((False, traceback.format_exc()))
    tp.close()
