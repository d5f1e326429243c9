"""`examples/check_answers.py` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minisgl_batch.demo.data import example_rows

SCRIPT = Path(__file__).parents[3] / "examples" / "check_answers.py"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("num_wrong", "num_failed", "exit_code"), [(0, 0, 0), (6, 0, 0), (3, 4, 1)])
def test_counts_the_right_rows_of_all_parts(tmp_path: Path, num_wrong: int, num_failed: int, exit_code: int) -> None:
    rows = [
        {
            "text": row["metadata"]["answer"],
            "status": "ok",
            "metadata": json.dumps(row["metadata"]),
        }
        for row in example_rows()
    ]
    for row in rows[:num_wrong]:
        row["text"] += "."
    for row in rows[num_wrong : num_wrong + num_failed]:
        row["status"] = "error"
    for name, part in (("part-000000.parquet", rows[:100]), ("part-000001.parquet", rows[100:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    done = check(tmp_path)
    assert done.returncode == exit_code, done.stderr
    num_right = len(rows) - num_wrong - num_failed
    assert done.stdout.splitlines()[-1].split() == ["all", str(num_right), "224", f"{num_right / 224:.1%}"]


def test_a_folder_without_parts_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
