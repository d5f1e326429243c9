"""The examples of README.md and docs/data.md, run as they stand there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

ROOT = Path(__file__).parents[2]
SHIM = f'#!/bin/sh\nexec "{sys.executable}" -m minisgl_batch.cli.main "$@"\n'


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def env(home: Path, tmp_path: Path) -> dict[str, str]:
    """The environment that `make demo` leaves."""
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    (folder / "activate").write_text(f'PATH="{folder}:$PATH"\n')
    command = folder / "minisgl-batch"
    command.write_text(SHIM)
    command.chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return environment(XDG_STATE_HOME=str(home / "state"), TMPDIR=str(home / "tmp"), PATH=path)


def run(*command: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.timeout(180)
def test_the_ten_lines_and_what_follows_them(env: dict[str, str], tmp_path: Path) -> None:
    (lines,) = [block for block in blocks("README.md", "bash") if "minisgl-batch run" in block]
    result = run("bash", "-ec", f"{lines}\nkill %1\nwait %1", cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    assert "finished: 2 rows ok, 0 failed" in result.stderr
    assert "2 rows queued for demo" in result.stderr
    assert "JOB " in result.stdout

    printed = [
        run(sys.executable, "-c", block, cwd=tmp_path, env=env).stdout for block in blocks("README.md", "python")
    ]
    assert len(printed) == 2
    assert "{'custom_id': 'sum', 'text': '42'," in printed[0]
    assert printed[1] == "42\n"


@pytest.mark.timeout(180)
def test_from_csv_to_parquet(env: dict[str, str], tmp_path: Path) -> None:
    (lines,) = [block for block in blocks("docs/data.md", "bash") if "questions.csv" in block]
    assert run("bash", "-ec", lines, cwd=tmp_path, env=env).returncode == 0
    result = run(sys.executable, "-c", blocks("docs/data.md", "python")[0], cwd=tmp_path, env=env)
    assert ast.literal_eval(result.stdout) == [
        {"id": 7, "question": "What is 17 + 25?", "text": "42"},
        {"id": 8, "question": "Write 93 in words.", "text": "ninety-three"},
    ], result.stderr
