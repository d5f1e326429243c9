"""Where a model's files are: the demo model in this package, a local folder, or the Hugging Face hub's cache.

Knows nothing of what is inside. Called by tokenizers (frontend) and weight loading (ranks).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from minisgl_batch.errors import ModelError

DEMO_MODEL = "demo"
_TEXT_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors"]


def model_path(model: str, *, weights: bool = True) -> Path:
    """The local folder that holds `model`; downloads a hub id on first use.

    Args:
        model: "demo", a folder with a config.json, or a hub id such as "Qwen/Qwen3-0.6B".
        weights: without them, only what a tokenizer needs is downloaded.

    Raises:
        ModelError: there is no such folder and the hub has no such model or can't be reached.
    """
    if model == DEMO_MODEL:
        return Path(str(files("minisgl_batch") / "demo" / "model"))
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} holds no config.json: give a model folder in Hugging Face format")
        return folder
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ModelError(f"no model folder at {folder}")
    return _download(model, _TEXT_FILES + _WEIGHT_FILES if weights else _TEXT_FILES)


def _download(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"can't get model {model!r}: it is no local folder, and the Hugging Face hub answered: {error}"
        ) from error
