"""The README's examples, run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SHIM = f'#!/bin/sh\nexec "{sys.executable}" -m minisgl_batch.cli.main "$@"\n'


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.timeout(180)
def test_the_ten_lines_and_what_follows_them(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / ".venv/bin"  # as `make demo` leaves it
    folder.mkdir(parents=True)
    (folder / "activate").write_text(f'PATH="{folder}:$PATH"\n')
    command = folder / "minisgl-batch"
    command.write_text(SHIM)
    command.chmod(0o755)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = environment(XDG_STATE_HOME=str(home / "state"), TMPDIR=str(home / "tmp"), PATH=path)
    (lines,) = [block for block in blocks("bash") if "minisgl-batch run" in block]
    command_line = ["bash", "-ec", f"{lines}\nkill %1\nwait %1"]
    result = subprocess.run(command_line, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "finished: 2 rows ok, 0 failed" in result.stderr
    assert "2 rows queued for demo" in result.stderr
    assert "JOB " in result.stdout

    printed = [
        subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout
        for block in blocks("python")
    ]
    assert len(printed) == 2
    assert "{'custom_id': 'sum', 'text': '42'," in printed[0]
    assert printed[1] == "42\n"
