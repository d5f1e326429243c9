"""What each of several groups gets of its host."""

from __future__ import annotations

import pytest
import torch

from minisgl_batch.config import EngineConfig
from minisgl_batch.errors import UsageError
from minisgl_workers.groups import share_of_host, visible_gpus
from minisgl_workers.options import WorkerOptions


def options(**engine: object) -> WorkerOptions:
    return WorkerOptions(engine=EngineConfig(model="m", **engine), redis_url="unix:///nowhere")  # type: ignore[arg-type]


def test_groups_get_gpus_of_their_own() -> None:
    shares = [share_of_host(options(tp=2), number, 2, ["4", "5", "6", "7"]) for number in range(2)]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in shares] == ["4,5", "6,7"]
    assert {given.engine.device for given, _ in shares} == {"cuda"}  # none falls back to the processors


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match="3 groups of 2 ranks need 6 GPUs, and there are 4"):
        share_of_host(options(tp=2), 0, 3, ["0", "1", "2", "3"])
    with pytest.raises(UsageError, match="need 2 GPUs, and there are 0"):
        share_of_host(options(device="cuda"), 0, 2, [])


def test_groups_on_processors_share_them_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    given, env = share_of_host(options(tp=2, memory_ratio=0.8), 1, 4, [])
    assert env["OMP_NUM_THREADS"] == "4"
    assert (given.engine.device, given.engine.memory_ratio) == ("cpu", 0.2)
    assert share_of_host(options(), 0, 2, [])[0].engine.memory_ratio == 0.2


def test_gpus_are_counted_as_cuda_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(visible_gpus()) == torch.cuda.device_count()
    monkeypatch.setattr("minisgl_workers.groups._COUNT_GPUS", "print(2)")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert visible_gpus() == ["3", "GPU-abc"]
