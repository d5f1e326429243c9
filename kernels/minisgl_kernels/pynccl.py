"""NCCL as far as we need it, called straight from Python: collectives on the current stream, and memory for them.

torch.distributed's NCCL doesn't register windows of symmetric memory, in which NCCL's kernels reach the other GPUs
without copies, and does more work on the host per call. The library is the one that torch has loaded.

Source of names and numbers: nccl.h of NCCL 2.27, in which windows came.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_void_p
from functools import cache

import torch

_SUM = 0
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: every rank registers a window of the same size
_ID_BYTES = 128


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * _ID_BYTES)]


_SIGNATURES = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(_UniqueId)],
    "ncclCommInitRank": [POINTER(c_void_p), c_int, _UniqueId, c_int],
    "ncclCommDestroy": [c_void_p],
    "ncclCommAbort": [c_void_p],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAllGather": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
}
_WINDOW_SIGNATURES = {
    "ncclMemAlloc": [POINTER(c_void_p), c_size_t],
    "ncclMemFree": [c_void_p],
    "ncclCommWindowRegister": [c_void_p, c_void_p, c_size_t, POINTER(c_void_p), c_int],
    "ncclCommWindowDeregister": [c_void_p, c_void_p],
}


class NcclError(RuntimeError):
    """A call of NCCL failed."""


class _Library:
    """The functions, checked.

    Raises:
        OSError: there is no NCCL.
        AttributeError: it is too old.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclGetErrorString.argtypes = [c_int]
        for name, types in _SIGNATURES.items():
            getattr(self._library, name).argtypes = types
        try:
            for name, types in _WINDOW_SIGNATURES.items():
                getattr(self._library, name).argtypes = types
            self.has_windows = True
        except AttributeError:
            self.has_windows = False

    def call(self, name: str, *args: object) -> None:
        result: int = getattr(self._library, name)(*args)
        if result != 0:
            raise NcclError(f"{name}: {self._library.ncclGetErrorString(result).decode()}")


@cache
def _library() -> _Library:
    return _Library()


def version() -> str:
    """NCCL's version, such as "2.28.9".

    Raises:
        OSError, AttributeError: there is no NCCL, or one that is too old.
    """
    number = c_int()
    _library().call("ncclGetVersion", byref(number))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def new_unique_id() -> bytes:
    """What the ranks of a new group know each other by; made by one of them."""
    unique_id = _UniqueId()
    _library().call("ncclGetUniqueId", byref(unique_id))
    return bytes(unique_id)


class NcclComm:
    """One rank's end of a group; all ranks make theirs together.

    Args:
        unique_id: from `new_unique_id`, the same on all ranks.
        rank, size: of the group.
        device: this rank's GPU.
    """

    def __init__(self, unique_id: bytes, rank: int, size: int, device: torch.device) -> None:
        self._nccl = _library()
        self._device = device
        self._comm = c_void_p()
        self._windows: list[tuple[c_void_p, c_void_p]] = []  # memory and what it is registered as
        self._is_aborted = False
        with torch.cuda.device(device):
            self._nccl.call("ncclCommInitRank", byref(self._comm), size, _UniqueId.from_buffer_copy(unique_id), rank)

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The sum of all ranks' `x`, contiguous, in `out`, which may be `x`."""
        self._collect("ncclAllReduce", x.data_ptr(), out.data_ptr(), x.numel(), _DTYPES[x.dtype], _SUM)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """All ranks' `x`, contiguous, one after the other in `out`."""
        self._collect("ncclAllGather", x.data_ptr(), out.data_ptr(), x.numel(), _DTYPES[x.dtype])

    def new_window(self, num_bytes: int) -> torch.Tensor | None:
        """Symmetric memory, (num_bytes,) uint8, until `close`; called by all ranks together.

        None where NCCL has no windows or the GPUs allow none.
        """
        if not self._nccl.has_windows:
            return None
        memory, window = c_void_p(), c_void_p()
        with torch.cuda.device(self._device):
            self._nccl.call("ncclMemAlloc", byref(memory), num_bytes)
            self._nccl.call("ncclCommWindowRegister", self._comm, memory, num_bytes, byref(window), _SYMMETRIC)
        if not window.value:  # how NCCL says that it would be of no use
            self._nccl.call("ncclMemFree", memory)
            return None
        self._windows.append((memory, window))
        assert memory.value is not None
        return device_bytes(memory.value, num_bytes, self._device)

    def abort(self) -> None:
        """Let collectives that wait for a rank that is gone end; later ones do nothing. From any thread."""
        self._is_aborted = True
        self._nccl.call("ncclCommAbort", self._comm)

    def close(self) -> None:
        """Free all; no collective may run."""
        if self._is_aborted:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            for memory, window in self._windows:
                self._nccl.call("ncclCommWindowDeregister", self._comm, window)
                self._nccl.call("ncclMemFree", memory)
            self._nccl.call("ncclCommDestroy", self._comm)

    def _collect(self, name: str, *args: int) -> None:
        if not self._is_aborted:
            self._nccl.call(name, *args, self._comm, torch.cuda.current_stream(self._device).cuda_stream)


def device_bytes(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of a GPU as a tensor, (num_bytes,) uint8, which doesn't own it."""
    memory = torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)
    assert memory.data_ptr() == address, "torch made a copy"
    return memory


class _DeviceBytes:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
