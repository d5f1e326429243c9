"""Builds C++ kernels for this very CPU at first use, and loads them: with ctypes, or as Python modules.

The result is kept per user, by source, compiler, Python and CPU. Where there is no compiler, callers fall back to the
twins in `reference.py`.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType

logger = logging.getLogger(__name__)

# Not -ffast-math: a library linked with it flushes subnormal numbers to zero in the whole process that loads it.
_FAST_MATH = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"]
_FLAGS = ["-std=c++17", "-O3", "-march=native", *_FAST_MATH, "-fopenmp", "-fPIC", "-shared"]
_BUILD_TIMEOUT_S = 120


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library made from `csrc/<name>.cpp`; None, with a line in the log, where it can't be built."""
    library = _library(name, _FLAGS)
    try:
        return None if library is None else ctypes.CDLL(str(library))
    except OSError as error:
        _warn(name, error)
        return None


@cache
def load_module(name: str) -> ModuleType | None:
    """The Python module `name` made from `csrc/<name>.cpp`; None, with a line in the log, where it can't be built.

    For functions that are called so often that ctypes would cost more than they do.
    """
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        logger.info("Python's headers aren't installed: %s runs without C++, which is slower", name)
        return None
    library = _library(name, [*_FLAGS, f"-I{include}"])
    if library is None:
        return None
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        _warn(name, error)
        return None
    return module


def cache_dir() -> Path:
    """Where built kernels are kept, and what was measured of kernels; only this user may write there."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minisgl-batch" / "kernels"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return _passing_cache_dir(str(error))
    return root


@cache
def _passing_cache_dir(reason: str) -> Path:
    """For this process alone, which builds everything anew."""
    folder = tempfile.mkdtemp(prefix="minisgl-batch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning("nothing is kept for later starts, set XDG_CACHE_HOME to a folder of yours: %s", reason)
    return Path(folder)


def _library(name: str, flags: list[str]) -> Path | None:
    """The built file, from the cache where it is there; None, with a line in the log, where it can't be built."""
    source = (files("minisgl_kernels") / "csrc" / f"{name}.cpp").read_text(encoding="utf-8")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        logger.info("no C++ compiler here: %s runs without C++, which is slower", name)
        return None
    library = cache_dir() / f"{name}-{_identity(source, [compiler, *flags])}.so"
    try:
        if not library.exists():
            _build([compiler, *flags], source, library)
    except (OSError, subprocess.SubprocessError) as error:
        _warn(name, getattr(error, "stderr", None) or error)
        return None
    return library


def _warn(name: str, reason: object) -> None:
    logger.warning("%s can't be built and runs without C++, which is slower: %s", name, reason)


def _build(command: list[str], source: str, library: Path) -> None:
    """Compile next to the target and rename, so that processes that build at once don't meet half a file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        code.write_text(source, encoding="utf-8")
        command = [*command, str(code), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
        built.replace(library)


def _identity(source: str, command: list[str]) -> str:
    """What a build depends on. A home folder may be shared by machines with different CPUs."""
    cpu = platform.machine() + platform.processor() + _cpu_flags()
    parts = [source, *command, str(sysconfig.get_config_var("EXT_SUFFIX")), cpu]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
