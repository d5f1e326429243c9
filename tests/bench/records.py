"""What a bench measured, as a JSON line with what is needed to judge it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMIT_VARIABLE = "MINISGL_COMMIT"
RESULTS = Path(__file__).parent / "results"


def record(bench: str, measured: dict[str, Any], *, save: bool, module: str = "") -> None:
    """Print a result, and with `save` append it to the bench's file."""
    line = json.dumps(
        {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "command": f"python -m {module or f'tests.bench {bench}'} {shlex.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "load": round(os.getloadavg()[0], 1),
            **measured,
        }
    )
    print(line, flush=True)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{bench}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def about(module: str) -> dict[str, Any]:
    """What lines of GPU runs have behind what was measured. Uses a GPU itself, to ask for its name."""
    import torch

    from minisgl_batch.cli.bench import _PACKAGES, _version

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": f"python -m {module} {shlex.join(sys.argv[1:])}".strip(),
    }


def commit() -> str:
    """Of the tree that runs: what MINISGL_COMMIT says, for copies without a history, else what git does; or ""."""
    if COMMIT_VARIABLE in os.environ or shutil.which("git") is None:
        return os.environ.get(COMMIT_VARIABLE, "")
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> str:
    """The machine in neutral words."""
    return f"{len(os.sched_getaffinity(0))}-core {platform.machine()}, Python {platform.python_version()}"
