"""What a bench measured, as a JSON line with what is needed to judge it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def record(bench: str, measured: dict[str, Any], *, save: bool, module: str = "") -> None:
    """Print a result, and with `save` append it to the bench's file."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    line = json.dumps(
        {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": commit.stdout.strip(),
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


def machine() -> str:
    """The machine in neutral words."""
    return f"{len(os.sched_getaffinity(0))}-core {platform.machine()}, Python {platform.python_version()}"
