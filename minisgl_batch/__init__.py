"""minisgl-batch: offline LLM inference as a service. Prompts in, Parquet out.

Importing this package imports no torch: what is large is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minisgl_batch._version import __version__
from minisgl_batch.engine_extra import require_engine
from minisgl_batch.errors import MiniSGLError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from minisgl_batch.client import AsyncClient, AsyncJobHandle, Client, JobHandle, JobState
    from minisgl_batch.llm import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncJobHandle",
    "Client",
    "JobHandle",
    "JobState",
    "MiniSGLError",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {"LLM": "llm"}
_HOMES |= dict.fromkeys(("AsyncClient", "AsyncJobHandle", "Client", "JobHandle", "JobState"), "client")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if name == "LLM":
            require_engine()
        return getattr(import_module(f"minisgl_batch.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
