"""A folder belongs to one job at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisgl_batch.errors import OutputError, OutputTakenError
from minisgl_jobs.dataset import check_output
from minisgl_jobs.owner import OWNER, claim_output, output_owner, release_output, take_output


def test_a_folder_is_the_output_of_one_job_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    claim_output(folder, "a")
    claim_output(folder, "a")
    with pytest.raises(OutputError, match="the output of job a, which hasn't ended"):
        claim_output(folder, "b")
    with pytest.raises(OutputError, match="the output of job a, which hasn't ended: choose another folder"):
        check_output(folder)
    check_output(folder, job_id="a")  # the same job once more
    with pytest.raises(OutputError, match="the output of job a"):
        check_output(folder, job_id="b")
    check_output(folder, overwrite=True)
    release_output(folder, "b")
    assert os.listdir(folder) == [OWNER]
    release_output(folder, "a")
    release_output(folder, "a")
    check_output(folder)


def test_one_of_several_jobs_takes_a_folder_from_one_that_is_over(tmp_path: Path) -> None:
    """The second has looked before the first took it."""
    claim_output(tmp_path, "over")
    take_output(tmp_path, "first", "over")
    with pytest.raises(OutputTakenError, match="the output of job first"):
        take_output(tmp_path, "second", "over")
    assert [path.name for path in tmp_path.iterdir()] == [OWNER]
    assert output_owner(tmp_path) == "first"
