"""`bench`, with a workload that a CPU is done with at once."""

from __future__ import annotations

import json

import psutil
import pytest

from minisgl_batch import bench
from minisgl_batch.child_process import DUMP_STACKS_ENV
from tests.minisgl_batch.cli.conftest import RunCli

OPTIONS = ("--model", "demo", "--device", "cpu", "--num-pages", 64)


def test_the_other_ranks_end_in_silence(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "workload", lambda _: [([1, 2, 3], 4)] * 3)
    monkeypatch.setenv(DUMP_STACKS_ENV, "1")  # as with --timeout-s
    before = set(psutil.Process().children())
    result = json.loads(run_cli("bench", "U", *OPTIONS, "--tp", 2).stdout)
    assert (result["tp"], result["output_tokens"]) == (2, 12)
    assert not set(psutil.Process().children()) - before
    assert "most recent call first" not in capfd.readouterr().err
