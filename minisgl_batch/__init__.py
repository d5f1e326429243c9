"""minisgl-batch: offline LLM inference as a service. Prompts in, Parquet out.

Importing this package imports no torch: the engine's `LLM` is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl_batch._version import __version__
from minisgl_batch.errors import MiniSGLError
from minisgl_batch.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minisgl_batch.llm import LLM

__all__ = ["LLM", "MiniSGLError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from minisgl_batch.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
