"""Whether the packages of the `engine` extra are installed: a client alone goes without them.

Imports none of them. Called by whoever is about to.
"""

from __future__ import annotations

from importlib.util import find_spec

from minisgl_batch.errors import UsageError

# What the extra's packages are imported as.
ENGINE_MODULES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "zmq",
    "llguidance",
    "jinja2",
    "numpy",
    "psutil",
    "regex",
)


def require_engine() -> None:
    """Raise UsageError where only the client is installed."""
    missing = missing_engine_modules()
    if missing:
        raise UsageError(f"the engine isn't installed ({', '.join(missing)}): pip install 'minisgl-batch[engine]'")


def missing_engine_modules() -> list[str]:
    """Packages of the `engine` extra that aren't installed."""
    return [name for name in ENGINE_MODULES if find_spec(name) is None]
