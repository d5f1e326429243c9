"""Fixtures of the client's tests: a client of an empty Redis, and jobs of the model that echoes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minisgl_batch.client import Client, JobHandle
from minisgl_jobs.model import RowResult
from tests.minisgl_batch.echo_worker import MODEL

DEADLINE_S = 20.0


@pytest.fixture
def submit(api: Client, tmp_path: Path) -> Callable[..., JobHandle]:
    """Submits prompts to the echo model; the output is `out` in the test's folder."""

    def submit_prompts(prompts: object, **options: object) -> JobHandle:
        return api.submit(prompts, **{"model": MODEL, "output": tmp_path / "out", **options})  # type: ignore[arg-type]

    return submit_prompts


def half_done(job: JobHandle) -> bool:
    return job.status().num_spooled > 0


def texts(results: Iterator[RowResult]) -> dict[int, str]:
    return {result.row_index: result.text for result in results}
