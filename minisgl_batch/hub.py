"""Where a model's files are: the demo model in this package, a local folder, or the Hugging Face hub's cache.

Knows nothing of what is inside. Called by tokenizers (frontend) and weight loading (ranks).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from minisgl_batch.errors import ModelError, ModelNotFoundError
from minisgl_batch.words import one_line

DEMO_MODEL = "demo"
MAX_ANSWER_CHARS = 200
_TEXT_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors"]


def model_path(model: str, *, weights: bool = True) -> Path:
    """The local folder that holds `model`; downloads a hub id on first use.

    Args:
        model: "demo", a folder with a config.json, or a hub id such as "Qwen/Qwen3-0.6B".
        weights: without them, only what a tokenizer needs is downloaded.

    Raises:
        ModelNotFoundError: there is no such folder and no such hub id.
        ModelError: the folder is none of a model, or the hub can't be reached.
    """
    if model == DEMO_MODEL:
        return Path(str(files("minisgl_batch") / "demo" / "model"))
    if model.lower() == DEMO_MODEL:
        raise ModelNotFoundError(f'there is no model {model!r}; did you mean "{DEMO_MODEL}"?')
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _with_config(folder)
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ModelNotFoundError(f"no model folder at {folder}")
    return _with_config(_download(model, _TEXT_FILES + _WEIGHT_FILES if weights else _TEXT_FILES))


def refuse_adapter(folder: Path) -> None:
    """
    Raises:
        ModelError: the folder holds a LoRA adapter; says what to do.
    """
    config = folder / "adapter_config.json"
    if config.is_file():
        raise ModelError(
            f"{config}: LoRA adapters aren't supported: merge the adapter into the model that it was made for "
            "(base_model_name_or_path) with peft's merge_and_unload, save that and its tokenizer with save_pretrained, "
            "and give the new folder"
        )


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        refuse_adapter(folder)
        raise ModelError(f"{folder} holds no config.json: give a model folder in Hugging Face format")
    return folder


def _download(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelNotFoundError(
            f"there is no model {model!r}: give {DEMO_MODEL}, a folder, or a hub id such as Qwen/Qwen3-0.6B "
            f"(the Hugging Face hub answered: {one_line(str(error), MAX_ANSWER_CHARS)})"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"can't get model {model!r}: it is no folder here, and not {DEMO_MODEL}; the Hugging Face hub answered: "
            f"{one_line(str(error), MAX_ANSWER_CHARS)}"
        ) from error
