"""Where a model's files are: the demo model in this package, a local folder, or the Hugging Face hub's cache.

Knows nothing of what is inside. Called by tokenizers (frontend) and weight loading (ranks).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from minisgl_batch.errors import InvalidParameterError, ModelError, ModelNotFoundError, ModelUnavailableError
from minisgl_batch.words import one_line

logger = logging.getLogger(__name__)

DEMO_MODEL = "demo"
MAX_ANSWER_CHARS = 200
_TEXT_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors"]
_POINTER = b"version https://git-lfs.github.com/spec/"
_OTHER_COPIES = ["original/*", "consolidated*"]  # gpt-oss' and Mistral's weights once more, as their makers name them
_ADAPTER = "adapter_config.json"
_NUM_SAMPLES, _SAMPLE_BYTES = 32, 4096  # of a large file
_MAX_TEXT_BYTES = 64 << 20  # larger texts than a tokenizer's are no part of the model, such as what it was trained on
_COMMIT = re.compile("[0-9a-f]{40}")


def model_path(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder that holds `model`; downloads a hub id on first use.

    Args:
        model: "demo", a folder with a config.json, or a hub id such as "Qwen/Qwen3-0.6B", perhaps with the revision
            behind it: "Qwen/Qwen3-0.6B@main".
        revision: of a hub id, a branch, tag or commit; by default its main branch.
        weights: without them, only what a tokenizer needs is downloaded.

    Raises:
        ModelNotFoundError: there is no such folder and no such hub id, or it has no such revision.
        ModelUnavailableError: the hub can't be reached.
        ModelError: the folder is none of a model.
        InvalidParameterError: a revision was given for something else than a hub id, or two were.
    """
    if revision is not None and _is_here(model):
        raise InvalidParameterError("revision", f"{model!r} is no hub id, and nothing else has revisions: leave it out")
    if model == DEMO_MODEL:
        return _demo_folder()
    if model.lower() == DEMO_MODEL:
        raise ModelNotFoundError(f'there is no model {model!r}; did you mean "{DEMO_MODEL}"?')
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _with_config(folder)
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ModelNotFoundError(f"no model folder at {folder}")
    name, revision = _split(model, revision)
    return _with_config(_download(name, revision, _TEXT_FILES + _WEIGHT_FILES if weights else _TEXT_FILES))


def folder_here(model: str) -> Path | None:
    """The folder of a model that is no hub id, whatever is in it; None for others, of which nothing is looked up."""
    if not _is_here(model):
        return None
    return _demo_folder() if model == DEMO_MODEL else Path(model).expanduser()


def commit_of(path: Path) -> str | None:
    """The commit of a hub id's files in the hub's cache; None for other folders."""
    return path.name if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name) else None


def fingerprint(folder: Path) -> str:
    """Tells a model's files from others, without reading all of them: 16 hex digits.

    Texts count as a whole; weights, and texts that are as large, by their size and by samples that are spread over each
    file. What can't be read, or is no file, doesn't count: whoever needs it says so.
    """
    found = hashlib.sha256()
    for pattern in (*_TEXT_FILES, *_WEIGHT_FILES):
        for path in sorted(folder.glob(pattern)):
            with suppress(OSError):
                if path.is_file():
                    found.update(_file_digest(path, is_text=pattern in _TEXT_FILES))
    return found.hexdigest()[:16]


def _file_digest(path: Path, *, is_text: bool) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(os.fsencode(path.name) + f" {size}\n".encode())
    with path.open("rb") as file:
        if is_text and size <= _MAX_TEXT_BYTES:
            digest.update(file.read(size))
        else:
            for sample in range(_NUM_SAMPLES):
                file.seek(size * sample // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def folder_of(model: str, revision: str | None) -> str:
    """The name of a model, or the folder of the files that a hub id stands for now, downloaded.

    Whoever is given it runs the same, also when the hub has others by then, and asks no hub. Errors as `model_path`.
    """
    path = model_path(model, revision)
    return model if _is_here(model) else str(path)


def _demo_folder() -> Path:
    return Path(str(files("minisgl_batch") / "demo" / "model"))


def _is_here(model: str) -> bool:
    """Whether it is no hub id."""
    return model == DEMO_MODEL or Path(model).expanduser().is_dir()


def _split(model: str, revision: str | None) -> tuple[str, str | None]:
    """A hub id, and the revision that stands behind it or was given."""
    name, mark, behind = model.partition("@")
    if not mark:
        return model, revision
    if revision is not None:
        raise InvalidParameterError("revision", f"{model!r} names one, too: give one of them")
    if _is_here(name):
        raise ModelNotFoundError(f"there is no model {model!r}: {name} is no hub id, and nothing else has revisions")
    if not behind:
        raise ModelNotFoundError(f"there is no model {model!r}: a branch, tag or commit must follow the @")
    return name, behind


def refuse_adapter(folder: Path) -> None:
    """
    Raises:
        ModelError: the folder holds a LoRA adapter; says what to do.
    """
    config = folder / _ADAPTER
    if config.is_file():
        raise ModelError(
            f"{config}: LoRA adapters aren't supported: merge the adapter into the model that it was made for "
            "(base_model_name_or_path) with peft's merge_and_unload, save that and its tokenizer with save_pretrained, "
            "and give the new folder"
        )


def refuse_pointer(file: Path) -> None:
    """
    Raises:
        ModelError: the file is what git leaves in the place of a large one without git-lfs; says what to do.
    """
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise ModelError(
                f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in {file.parent}, or give the "
                "model's hub id"
            )


def warn_of_adapter(folder: Path) -> None:
    """Log a warning when a LoRA adapter lies beside a model's weights, as training tools leave it."""
    config = folder / _ADAPTER
    if config.is_file():
        logger.warning("%s: the adapter isn't applied, the weights beside it run as they are", config)


def _with_config(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        refuse_adapter(folder)
        raise ModelError(f"{folder} holds no config.json: give a model folder in Hugging Face format")
    return folder


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"model {model!r}" + (f" at revision {revision!r}" if revision is not None else "")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_OTHER_COPIES))
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"there is no {what}: give a branch, a tag or a commit that it has") from error
    except GatedRepoError as error:
        raise ModelError(
            f"can't get {what}: it is for those who accepted its terms: do so on its page at the Hugging Face hub, and "
            "set HF_TOKEN to a token of that account"
        ) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ModelNotFoundError(
            f"there is no model {model!r}: give {DEMO_MODEL}, a folder, or a hub id such as Qwen/Qwen3-0.6B "
            f"(the Hugging Face hub answered: {one_line(' '.join(str(error).split()), MAX_ANSWER_CHARS)})"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelUnavailableError(
                f"{what} is no folder here and isn't whole in the Hugging Face hub's cache {constants.HF_HUB_CACHE}, "
                "and HF_HUB_OFFLINE is set: unset it to download the model, or set HF_HOME to where it is"
            ) from error
        why = one_line(" ".join(str(error.__cause__ or error).split()), MAX_ANSWER_CHARS)
        raise ModelUnavailableError(
            f"can't get {what} from the Hugging Face hub, and it is no folder here: {why}; check the network and the "
            "disk, or give a local folder; HF_HUB_OFFLINE=1 takes what is whole in the hub's cache"
        ) from error
