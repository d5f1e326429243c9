"""`bench`, with workloads that a CPU is done with at once."""

from __future__ import annotations

import json

import psutil
import pytest

from minisgl_batch.bench import workload
from minisgl_batch.child_process import DUMP_STACKS_ENV
from tests.minisgl_batch.cli.conftest import RunCli

OPTIONS = ("--model", "demo", "--device", "cpu", "--num-pages", 64)


def test_the_other_ranks_end_in_silence(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DUMP_STACKS_ENV, "1")  # as with --timeout-s
    before = set(psutil.Process().children())
    result = json.loads(run_cli("bench", "U", *OPTIONS, "--tp", 2, "--shrink", 64).stdout)
    prompts = workload("U", shrink=64)
    assert (result["tp"], result["workload"]) == (2, "U/64")
    assert result["prompt_tokens"] == sum(len(ids) for ids, _ in prompts)
    assert result["output_tokens"] == sum(num_tokens for _, num_tokens in prompts)
    assert not set(psutil.Process().children()) - before
    assert "most recent call first" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "shrink", "num_prompts", "shared"), [("U", 64, 4, 0), ("S", 64, 16, 8), ("P", 8, 128, 256)]
)
def test_shrunk_workloads_keep_their_form(name: str, shrink: int, num_prompts: int, shared: int) -> None:
    prompts = [ids for ids, _ in workload(name, shrink)]
    assert len(prompts) == num_prompts
    assert len({tuple(ids[:shared]) for ids in prompts}) == 1
    assert len({tuple(ids) for ids in prompts}) > num_prompts // 2
