"""The tensors of a model folder's safetensors files, read by slices. Knows nothing of models.

Called by `weights`. Names lose the "model." that checkpoints of whole language models have, and checkpoints of bare
base models don't, and the "language_model." of those that read images as well.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minisgl_batch.errors import ModelError
from minisgl_batch.hub import refuse_adapter, refuse_pointer
from minisgl_batch.layers.base import Part
from minisgl_batch.models import mxfp4

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")
_PREFIXES = re.compile(r"^(model\.)?(language_model\.)?(model\.)?")
_WHAT_TO_DO = (
    "convert them to safetensors, such as by loading the model with transformers and saving it with save_pretrained"
)
_COMPARED_ROWS = 4096  # at a time
_FP8 = "F8_E4M3"
_TYPES = ("F64", "F32", "F16", "BF16", _FP8)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is.

    Attributes:
        name: without the "model." prefix.
        key: as the file has it.
        file: which file.
        shape: of the whole tensor, or of its rows that have the name.
        dtype: as safetensors calls it.
        first_row: where those begin.
        scales: of a tensor in MXFP4, which this one holds the blocks of; the shape is that of the unpacked tensor.
    """

    name: str
    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    first_row: int = 0
    scales: StoredTensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.dtype == _FP8

    def read(self, opened: Any, index: tuple[slice, ...]) -> torch.Tensor:
        """A part of it from its open file. Dimensions that it lacks have a length of 1."""
        tensor: torch.Tensor
        if not self.shape:
            tensor = opened.get_tensor(self.key)
            return tensor
        start, stop, _ = index[0].indices(self.shape[0])
        where = slice(self.first_row + start, self.first_row + stop), *index[1 : len(self.shape)]
        tensor = opened.get_slice(self.key)[where]
        return tensor


class Checkpoint:
    """All tensors of a model folder, by name; only headers are read until `read`.

    Raises:
        ModelError: there are no safetensors files, or they are broken, incomplete or contradict each other; names
            file and tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        files, indexed = _find_files(folder)
        for file in files:
            for tensor in _read_header(file):
                other = self.tensors.setdefault(tensor.name, tensor)
                if other is not tensor:
                    raise ModelError(f"{file} holds {tensor.key}, but {other.file} holds {other.key} already")
        for key, file in indexed.items():
            stored = self.tensors.get(_plain_name(key))
            if stored is None or stored.file != file:
                raise ModelError(f"{folder / INDEX} says that {file.name} holds {key}, but it doesn't")
        _join_packed(self.tensors)

    def whole(self, stored: StoredTensor) -> torch.Tensor:
        """All of one tensor."""
        with _open(stored.file) as opened:
            tensor: torch.Tensor = opened.get_tensor(stored.key)
            return tensor

    def are_equal(self, name: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors have the same numbers as `dtype`; some rows of each are in memory at a time."""
        a, b = self.tensors[name], self.tensors[other]
        if a.shape != b.shape:
            return False
        with _open(a.file) as file_a, _open(b.file) as file_b:
            for start in range(0, a.shape[0] if a.shape else 1, _COMPARED_ROWS):
                rows = (slice(start, start + _COMPARED_ROWS),)
                if not torch.equal(a.read(file_a, rows).to(dtype), b.read(file_b, rows).to(dtype)):
                    return False
        return True

    def read(self, parts: Mapping[str, Part]) -> None:
        """Copy each part's share of its tensor to its target, file by file; one share is in memory besides."""
        by_file = defaultdict(list)
        for name, part in parts.items():
            by_file[self.tensors[name].file].append((self.tensors[name], part))
        for file, wanted in by_file.items():
            with _open(file) as opened:
                for stored, part in wanted:
                    if stored.scales is None:
                        values = stored.read(opened, part.index)
                        if fault := part.fault(values):
                            raise ModelError(f"{file}: {stored.key} {fault}")
                        part.fill(values)
                        continue
                    with _open(stored.scales.file) as other:
                        scales = other.get_slice(stored.scales.key)
                        mxfp4.read_unpacked(opened.get_slice(stored.key), scales, part)


def _find_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files to read, and what the index says is in which (nothing without an index)."""
    if (folder / INDEX).is_file():
        indexed = _read_index(folder / INDEX)
        return sorted(set(indexed.values())), indexed
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE], {}
    refuse_adapter(folder)
    # Mistral's repositories hold the same weights twice, under Mistral's own names in consolidated*.safetensors.
    files = sorted(f for f in folder.glob("*.safetensors") if f.is_file() and not f.name.startswith("consolidated"))
    if files:
        return files, {}
    others = sorted(file for pattern in _OTHER_FORMATS for file in folder.glob(pattern))
    if others:
        raise ModelError(f"{folder} holds weights as {others[0].name} only: {_WHAT_TO_DO}")
    # Nothing else is downloaded from the hub, where this may be the case as well.
    raise ModelError(
        f"{folder} holds no *.safetensors files; if the model has weights in another format, {_WHAT_TO_DO}"
    )


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        indexed = {str(key): path.parent / name for key, name in weight_map.items()}
        missing = next((key for key, file in indexed.items() if not file.is_file()), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"can't read {path}: {error!r}; it must hold a weight_map from tensors to files") from error
    if missing is not None:
        raise ModelError(f"{indexed[missing]} is missing; {path.name} says that it holds {missing}")
    return indexed


def _read_header(file: Path) -> Iterator[StoredTensor]:
    with _open(file) as opened:
        for key in opened.keys():  # noqa: SIM118 - it is no mapping
            stored = opened.get_slice(key)
            dtype = stored.get_dtype()
            is_packed = dtype == mxfp4.DTYPE and key.endswith((mxfp4.BLOCKS, mxfp4.SCALES))
            if dtype not in _TYPES and not is_packed:
                raise ModelError(
                    f"{file}: {key} is stored as {dtype}; quantized checkpoints aren't supported but in FP8, only "
                    + ", ".join(_TYPES)
                )
            yield StoredTensor(_plain_name(key), key, file, tuple(stored.get_shape()), dtype)


def _join_packed(tensors: dict[str, StoredTensor]) -> None:
    """Name tensors in MXFP4, which are two each, as other checkpoints do."""
    for blocks in [t for name, t in tensors.items() if name.endswith(mxfp4.BLOCKS) and t.dtype == mxfp4.DTYPE]:
        name = blocks.name.removesuffix(mxfp4.BLOCKS)
        scales = tensors.get(name + mxfp4.SCALES)
        if scales is None or scales.dtype != mxfp4.DTYPE:
            wrong = "none" if scales is None else f"{scales.dtype} in {scales.file}"
            raise ModelError(
                f"{blocks.file}: {blocks.key} needs {mxfp4.SCALES[1:]} as {mxfp4.DTYPE}, there are {wrong}"
            )
        shape = mxfp4.unpacked_shape(blocks.shape, scales.shape)
        if shape is None:
            raise ModelError(
                f"{blocks.file}: {blocks.key} has the shape {list(blocks.shape)} and its scales {list(scales.shape)}, "
                f"which aren't those of numbers in MXFP4"
            )
        del tensors[blocks.name], tensors[scales.name]
        tensors[name] = replace(blocks, name=name, shape=shape, scales=scales)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        refuse_pointer(file)
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelError(f"can't read {file}, it is broken or incomplete: {error}") from error


def _plain_name(key: str) -> str:
    return _PREFIXES.sub("", key)
