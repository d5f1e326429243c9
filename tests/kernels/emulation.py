"""The CUDA C++ kernels compiled for the CPU, with `emulator/emulate.h` in the place of a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from minisgl_kernels import cpp, cuda
from minisgl_kernels.cuda import LayerKernels

_SOURCES = Path(cuda.__file__).parent / "csrc"
_EMULATOR = Path(__file__).parent / "emulator"
_CUDA_HEADERS = Path("/usr/local/cuda/include")


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels' callers call the emulated ones, for bfloat16."""
    kernels = LayerKernels(*(emulated(build_emulator(), name) for name in LayerKernels._fields))
    monkeypatch.setattr(cuda, "layer_kernels", lambda x: kernels if x.dtype == torch.bfloat16 else None)


def build_emulator() -> Path:
    """The library of emulated kernels; skips the test where it can't be built."""
    if shutil.which("g++") is None or not (_CUDA_HEADERS / "cuda_bf16.h").exists():
        pytest.skip("needs g++ and CUDA's headers")
    return _build()


def emulated(library: Path, name: str) -> Callable[..., None]:
    """A kernel's function."""
    kernels = ctypes.CDLL(str(library))
    return _caller(getattr(kernels, f"emulate_{name}"), kernels.emulate_stuck)


@contextmanager
def late_thread(library: Path, thread: int) -> Iterator[None]:
    """Let a thread of the first block, or of the first cluster, go on only when no other one can."""
    set_late = emulated(library, "late")
    set_late(thread)
    try:
        yield
    finally:
        set_late(-1)


@cache
def _build() -> Path:
    flags = [
        "-std=c++20",
        "-O2",
        "-fno-strict-aliasing",
        "-w",
        "-Wno-psabi",
        "-DMINISGL_EMULATE",
        f"-I{_CUDA_HEADERS}",
        f"-I{_SOURCES}",
        "-shared",
        "-fPIC",
    ]
    files = [*_EMULATOR.iterdir(), *_SOURCES.glob("*.cu*")]
    text = "\0".join([*flags, *(path.read_text(encoding="utf-8") for path in sorted(files))])
    library = cpp.cache_dir() / f"emulated-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # others may build it at the same time
            built = Path(folder) / library.name
            subprocess.run(["g++", *flags, str(_EMULATOR / "kernels.cpp"), "-o", str(built)], check=True)
            built.replace(library)
    return library


def _caller(function: ctypes._NamedFuncPointer, stuck: ctypes._NamedFuncPointer) -> Callable[..., None]:
    """Passes a tensor as its address, and its sizes with its strides from the fifth place on and its elements' size."""
    stuck.restype = ctypes.c_bool

    def call(*args: torch.Tensor | float | bool) -> None:
        values: list[object] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                sizes = (ctypes.c_int64 * 9)()
                sizes[: arg.ndim], sizes[4 : 4 + arg.ndim] = list(arg.shape), list(arg.stride())
                sizes[8] = arg.itemsize
                values += [ctypes.c_void_p(arg.data_ptr()), sizes]
            elif isinstance(arg, bool):
                values.append(ctypes.c_bool(arg))
            else:
                values.append(ctypes.c_double(arg))
        function(*values)
        assert not stuck(), "threads wait for what never comes"

    return call
