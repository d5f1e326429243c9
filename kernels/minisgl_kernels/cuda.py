"""The layer kernels in CUDA C++, compiled at first use for the GPU at hand, through apache-tvm-ffi.

But for `paged_decode` and `widen_pages` they do what the Triton kernels of the same names do, and a launch takes the
host a third of the time, which counts in steps that no CUDA graph holds. For Hopper; elsewhere, and where nvcc, ninja
or tvm-ffi is missing, Triton's run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple

import torch

from minisgl_kernels import cpp

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)


class LayerKernels(NamedTuple):
    """Each writes to tensors that its caller allocates; rows start at multiples of 16 bytes."""

    activate_fp8: Callable[..., None]
    add_rms_norm: Callable[..., None]
    add_rms_norm_fp8: Callable[..., None]
    norm_rope_store: Callable[..., None]
    paged_decode: Callable[..., None]
    silu_and_mul: Callable[..., None]
    widen_pages: Callable[..., None]


def layer_kernels(x: torch.Tensor) -> LayerKernels | None:
    """The kernels for x's type, on x's GPU; None where they don't run."""
    return _load(x.device) if x.dtype in _DTYPES else None


@cache
def _load(device: torch.device) -> LayerKernels | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        module = import_module("tvm_ffi").load_module(build())
        return LayerKernels(*(module[name] for name in LayerKernels._fields))
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("the CUDA C++ kernels can't be built and Triton's run, which start more slowly: %s", error)
        return None


def build() -> str:
    """Compile the layer kernels, or find them compiled; returns the library's path.

    Raises:
        ImportError: there is no tvm-ffi.
        RuntimeError: the compiler is missing or failed.
    """
    return build_library("layer_kernels", LayerKernels._fields)


def build_library(library: str, names: tuple[str, ...]) -> str:
    """Compile `csrc/NAME.cu` of all names into one library, or find it compiled; returns its path.

    Raises:
        ImportError: there is no tvm-ffi.
        RuntimeError: the compiler is missing or failed.
    """
    tvm_ffi_cpp = import_module("tvm_ffi.cpp")
    architecture = os.environ.get("TVM_FFI_CUDA_ARCH_LIST") or _architecture()
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = architecture
    with as_file(files("minisgl_kernels") / "csrc") as folder:
        sources = [folder / f"{name}.cu" for name in names]
        headers = sorted(folder.glob("*.cuh"))
        text = b"".join(path.read_bytes() for path in sources + headers) + architecture.encode()
        built = cpp.cache_dir() / f"{library}-{hashlib.sha256(text).hexdigest()[:16]}.so"
        if built.exists():
            return str(built)
        logger.info("compiling the CUDA C++ kernels: half a minute, once")
        # Elsewhere, then renamed: ranks that build at once don't meet half a file.
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            path = tvm_ffi_cpp.build(
                name=library,
                sources=[str(path) for path in sources],
                build_directory=scratch,
                # An nvcc on the PATH that is a script says nothing about where its libraries are.
                extra_ldflags=["-L/usr/local/cuda/lib64"],
            )
            Path(path).replace(built)
    return str(built)


def _architecture() -> str:
    """This GPU's, with what is Hopper's alone, for which tvm-ffi wouldn't compile by itself."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}{'a' if major == 9 else ''}"
