"""cuBLASLt as far as we need it, called straight from Python: x @ weight.T by an algorithm of the caller's choice.

In 16 bits, or in FP8 with a float32 scale for each row of either matrix.

torch leaves the choice to a heuristic. The library is the one that torch has loaded. Called by `matmul`.

Source of names and numbers: cublasLt.h, cublas_api.h and library_types.h of CUDA 13, which CUDA 12 has alike.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache

import torch

from minisgl_kernels.fp8 import Fp8Matrix

DTYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
ALIGNMENT_BYTES = 256  # of all tensors; what cuBLASLt takes for granted unless it is told otherwise
ALGORITHM_BYTES = 64

_R_32F = 0
_COMPUTE_32F = 68
_OP_T = 1
_DESC_TRANSA = 3
_DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER = 17, 18
_DESC_FAST_ACCUM = 25
_DESC_A_SCALE_MODE, _DESC_B_SCALE_MODE = 31, 32
_SCALE_OUTER_VEC_32F = 3
_PREF_MAX_WORKSPACE_BYTES = 1
_PREF_REDUCTION_SCHEME_MASK = 3
_REDUCTION_SCHEME_NONE = 0
_REDUCTION_SCHEME_COMPUTE_TYPE = 2
_MAX_CANDIDATES = 8


class _Algorithm(Structure):
    _fields_ = [("data", c_uint64 * (ALGORITHM_BYTES // 8))]


class _HeuristicResult(Structure):
    _fields_ = [
        ("algo", _Algorithm),
        ("workspace_size", c_size_t),
        ("state", c_int),
        ("waves_count", c_float),
        ("reserved", c_int * 4),
    ]


_PROBLEM = [c_void_p] * 6  # handle, operation, and the layouts of A, B, C and D
_SIGNATURES = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescDestroy": [c_void_p],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatrixLayoutDestroy": [c_void_p],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [*_PROBLEM, c_void_p, c_int, POINTER(_HeuristicResult), POINTER(c_int)],
    "cublasLtMatmulAlgoCheck": [*_PROBLEM, POINTER(_Algorithm), POINTER(_HeuristicResult)],
    # Handle, operation, alpha, A, B, beta, C, D, each matrix with its layout; algorithm, workspace, stream.
    "cublasLtMatmul": [*[c_void_p] * 12, POINTER(_Algorithm), c_void_p, c_size_t, c_void_p],
}


class CublasLtError(RuntimeError):
    """A call of cuBLASLt failed."""


class _Library:
    """The functions, checked.

    Raises:
        OSError: there is no cuBLASLt, or one that is too old.
    """

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise OSError("torch is built without CUDA")
        self._library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
        try:
            self._library.cublasLtGetVersion.restype = c_size_t
            self._library.cublasLtGetStatusString.restype = ctypes.c_char_p
            self._library.cublasLtGetStatusString.argtypes = [c_int]
            for name, types in _SIGNATURES.items():
                getattr(self._library, name).argtypes = types
        except AttributeError as error:
            raise OSError(f"cuBLASLt is too old: {error}") from error

    def version(self) -> int:
        version: int = self._library.cublasLtGetVersion()
        return version

    def call(self, name: str, *args: object) -> None:
        status: int = getattr(self._library, name)(*args)
        if status != 0:
            raise CublasLtError(f"{name}: {self._library.cublasLtGetStatusString(status).decode()}")


@cache
def _library() -> _Library:
    return _Library()


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _library().call("cublasLtCreate", byref(handle))
    return handle


def version() -> int:
    """cuBLASLt's version, such as 130100. What an algorithm's bytes mean depends on it.

    Raises:
        OSError: there is no cuBLASLt, or one that is too old.
    """
    return _library().version()


class Product:
    """x @ weight.T for tensors of one shape and type, contiguous and aligned to ALIGNMENT_BYTES.

    An algorithm is ALGORITHM_BYTES bytes, good for this GPU and this version of the library, in later processes too.
    Partial sums stay float32 whatever the algorithm; in FP8 they have the tensor cores' fewer bits.

    Args:
        num_rows, in_features: of x.
        out_features: of the weight, (out_features, in_features).
        dtype: of x and the weight; one of DTYPES.
        device: the GPU, which is the current one in all calls.
        out_dtype: of the product, where it isn't `dtype`.

    Raises:
        OSError: there is no cuBLASLt, or one that is too old.
        CublasLtError: it doesn't work here.
    """

    def __init__(
        self,
        num_rows: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._lt = _library()
        operation = self._create("MatmulDesc", _COMPUTE_32F, _R_32F)
        self._set("MatmulDesc", operation, _DESC_TRANSA, c_int32(_OP_T))
        if dtype == torch.float8_e4m3fn:
            for attribute in (_DESC_A_SCALE_MODE, _DESC_B_SCALE_MODE):
                self._set("MatmulDesc", operation, attribute, c_int32(_SCALE_OUTER_VEC_32F))
            self._set("MatmulDesc", operation, _DESC_FAST_ACCUM, c_int8(1))
            for attribute in (_DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER):  # suggestions are for some, aligned so
                self._set("MatmulDesc", operation, attribute, c_uint64(ALIGNMENT_BYTES))
        # cuBLAS reads memory by columns, and so finds all matrices transposed: out.T = weight @ x.T.
        a = self._create("MatrixLayout", DTYPES[dtype], in_features, out_features, in_features)
        b = self._create("MatrixLayout", DTYPES[dtype], in_features, num_rows, in_features)
        c = self._create("MatrixLayout", DTYPES[out_dtype or dtype], out_features, num_rows, out_features)
        self._a, self._b, self._c = a, b, c
        self._problem = (_handle(device), operation, a, b, c, c)

    def candidates(self, workspace_bytes: int, *, splits: bool = True) -> list[bytes]:
        """The library's own suggestions, which it thinks the fastest, best first; for a workspace of that size.

        `splits`: also those that sum parts of `in_features` apart.
        """
        preference = self._create("MatmulPreference")
        self._set("MatmulPreference", preference, _PREF_MAX_WORKSPACE_BYTES, c_uint64(workspace_bytes))
        schemes = c_uint32(_REDUCTION_SCHEME_COMPUTE_TYPE if splits else _REDUCTION_SCHEME_NONE)
        self._set("MatmulPreference", preference, _PREF_REDUCTION_SCHEME_MASK, schemes)
        results, count = (_HeuristicResult * _MAX_CANDIDATES)(), c_int()
        arguments = (*self._problem, preference, _MAX_CANDIDATES, results, byref(count))
        self._lt.call("cublasLtMatmulAlgoGetHeuristic", *arguments)
        return [bytes(result.algo) for result in results[: count.value] if result.state == 0]

    def check(self, algorithm: bytes, workspace_bytes: int) -> None:
        """Whether the algorithm, which may come from another number of rows, can run.

        Raises:
            CublasLtError: it can't.
        """
        result = _HeuristicResult()
        arguments = (*self._problem, byref(_Algorithm.from_buffer_copy(algorithm)), byref(result))
        self._lt.call("cublasLtMatmulAlgoCheck", *arguments)
        if result.workspace_size > workspace_bytes:
            raise CublasLtError(f"the algorithm needs a workspace of {result.workspace_size} bytes")

    def run(
        self,
        algorithm: bytes,
        x: torch.Tensor | Fp8Matrix,
        weight: torch.Tensor | Fp8Matrix,
        out: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        """Put x @ weight.T into `out`, (num_rows, out_features), on the current stream.

        Args:
            algorithm: one of `candidates`, or one that `check` passes.
            x, weight: what to multiply; in FP8 with a scale per row.
            out: where to put it.
            workspace: (num_bytes,) uint8; another stream's products must not use it meanwhile.
        """
        handle, operation = self._problem[:2]
        if isinstance(x, Fp8Matrix) and isinstance(weight, Fp8Matrix):
            self._set("MatmulDesc", operation, _DESC_B_SCALE_POINTER, c_uint64(x.scales.data_ptr()))
            self._set("MatmulDesc", operation, _DESC_A_SCALE_POINTER, c_uint64(weight.scales.data_ptr()))
            x, weight = x.values, weight.values
        assert isinstance(x, torch.Tensor)
        assert isinstance(weight, torch.Tensor)
        one, zero = c_float(1.0), c_float(0.0)
        self._lt.call(
            "cublasLtMatmul",
            *(handle, operation, byref(one), weight.data_ptr(), self._a, x.data_ptr(), self._b),
            *(byref(zero), out.data_ptr(), self._c, out.data_ptr(), self._c),
            *(byref(_Algorithm.from_buffer_copy(algorithm)), workspace.data_ptr(), workspace.nbytes),
            torch.cuda.current_stream(x.device).cuda_stream,
        )

    def _create(self, kind: str, *args: object) -> c_void_p:
        made = c_void_p()
        self._lt.call(f"cublasLt{kind}Create", byref(made), *args)
        weakref.finalize(self, self._lt.call, f"cublasLt{kind}Destroy", made).atexit = False
        return made

    def _set(self, kind: str, target: c_void_p, attribute: int, value: c_int8 | c_int32 | c_uint32 | c_uint64) -> None:
        self._lt.call(f"cublasLt{kind}SetAttribute", target, attribute, byref(value), ctypes.sizeof(value))
