"""Builds C++ kernels for this very CPU at first use, and loads them with ctypes.

The result is kept per user, by source, compiler and CPU. Where there is no compiler, callers fall back to the twins in
`reference.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path

logger = logging.getLogger(__name__)

_FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC", "-shared"]
_BUILD_TIMEOUT_S = 120


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library made from `csrc/<name>.cpp`; None, with a line in the log, where it can't be built."""
    source = (files("minisgl_kernels") / "csrc" / f"{name}.cpp").read_text(encoding="utf-8")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        logger.info("no C++ compiler here: %s runs as plain torch, which is slower", name)
        return None
    library = cache_dir() / f"{name}-{_identity(source, compiler)}.so"
    try:
        if not library.exists():
            _build(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("%s can't be built and runs as plain torch, which is slower: %s", name, detail)
        return None


def cache_dir() -> Path:
    """Where built kernels are kept; only this user may write there."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minisgl-batch" / "kernels"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def _build(compiler: str, source: str, library: Path) -> None:
    """Compile next to the target and rename, so that processes that build at once don't meet half a file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        code.write_text(source, encoding="utf-8")
        command = [compiler, *_FLAGS, str(code), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
        built.replace(library)


def _identity(source: str, compiler: str) -> str:
    """What a build depends on. A home folder may be shared by machines with different CPUs."""
    cpu = platform.machine() + platform.processor() + _cpu_flags()
    return hashlib.sha256("\0".join([source, compiler, *_FLAGS, cpu]).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
