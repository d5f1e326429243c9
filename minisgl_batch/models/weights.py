"""Fills a model's parameters: from a checkpoint, or with random numbers for benchmarks. Called by the engine.

Each rank reads only its share of every tensor, straight to where it belongs. Nothing is left to chance: each part of
each parameter is filled once, and each tensor of the checkpoint is used or known to be needless.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from minisgl_batch.errors import ModelError
from minisgl_batch.layers.base import Layer, Part
from minisgl_batch.models.base import CausalLM
from minisgl_batch.models.checkpoint import Checkpoint, StoredTensor
from minisgl_batch.models.config import ModelConfig
from minisgl_batch.models.kv_scales import read_kv_scales

DUMMY_STD = 0.02
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_NEEDLESS = re.compile(
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"  # buffers that old releases saved
    # Activations are scaled by token; `kv_scales` reads the others.
    r"|\.(input_scale|activation_scale|output_scale|[qkv]_scale|kv_scale)$"
    # What stands beside text models.
    r"|^(vision_tower|multi_modal_projector)\."
)
_SCALES = re.compile(r"\.weight_scale_inv$")  # one that's multiplied with, as well, in spite of its name
_MAX_NAMED = 5


def tied_as_stored(config: ModelConfig, path: Path, dtype: torch.dtype) -> ModelConfig:
    """The config, untied where the checkpoint in `path` holds a head of its own.

    As in transformers, a head that differs from the embedding, both as `dtype`, counts more than what config.json says.

    Raises:
        ModelError: the checkpoint can't be read.
    """
    if not config.tie_word_embeddings:
        return config
    checkpoint = Checkpoint(path)
    has_both = HEAD in checkpoint.tensors and EMBEDDING in checkpoint.tensors
    if not has_both or checkpoint.are_equal(HEAD, EMBEDDING, dtype):
        return config
    return replace(config, tie_word_embeddings=False)


def load_weights(model: CausalLM, path: Path) -> None:
    """Fill a model, once, from the safetensors files in `path`, cast to the model's dtype.

    Its config is `tied_as_stored`. Peak memory is the model's own share and one tensor's besides.

    Raises:
        ModelError: a file is missing or broken, or the checkpoint doesn't belong to the model's config: names the
            tensor, the file, and both shapes where they differ.
    """
    _read(Checkpoint(path), model)
    _finish(model)


def init_dummy_weights(model: CausalLM, seed: int) -> None:
    """Fill a model, once, with normal random numbers; norms get 1.

    Each rank makes every tensor as a whole, one at a time, and takes its share: a model is the same for any group
    size (on one kind of device).
    """
    for name, part in checkpoint_parts(model).items():
        target = part.target
        if part.name == "weight" and target.ndim == 1:  # only norms have a weight of one dimension
            target.fill_(1.0)
            continue
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        full = torch.empty(part.full_shape, dtype=part.dtype, device=target.device)
        part.fill(full.normal_(0.0, DUMMY_STD, generator=generator)[part.index])
    _finish(model)


def checkpoint_parts(model: CausalLM) -> dict[str, Part]:
    """What this rank takes of each tensor of a checkpoint, by the tensor's name (without "model.")."""
    parts = {}
    for path, layer in _layers(model):
        parent = path.rpartition(".")[0]
        for part in layer.parts():
            owner = path if part.sibling is None else f"{parent}.{part.sibling}"
            parts[f"{owner}.{part.name}"] = part
    return parts


def _read(checkpoint: Checkpoint, model: CausalLM) -> None:
    parts = checkpoint_parts(model)
    _rename_scales(checkpoint.tensors)
    if model.config.tie_word_embeddings:
        _drop_tied_copy(checkpoint.tensors)
    _split_merged(checkpoint.tensors, model)
    _check_names(checkpoint, parts, model.config.architecture)
    _check_kinds(checkpoint, parts)
    checkpoint.read(parts)
    _check_numbers(checkpoint, model, parts)
    read_kv_scales(checkpoint, model)


def _layers(model: CausalLM) -> list[tuple[str, Layer]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, Layer)]


def _finish(model: CausalLM) -> None:
    for _, layer in _layers(model):
        layer.finish()


def _drop_tied_copy(tensors: dict[str, StoredTensor]) -> None:
    """Some writers keep both names of a tied tensor, others only the one that sorts first."""
    head = tensors.pop(HEAD, None)
    if head is not None:
        tensors.setdefault(EMBEDDING, head)


def _rename_scales(tensors: dict[str, StoredTensor]) -> None:
    """Writers differ in what they call the scales of weights in FP8."""
    for name in [name for name in tensors if _SCALES.search(name)]:
        _add(tensors, _SCALES.sub(".weight_scale", name), tensors.pop(name))


def _add(tensors: dict[str, StoredTensor], name: str, stored: StoredTensor) -> None:
    """Give a tensor a name, which no other one may have."""
    other = tensors.setdefault(name, stored)
    if other is not stored:
        raise ModelError(f"{stored.file} holds {stored.key}, but {other.file} holds {other.key}: both are {name}")


def _split_merged(tensors: dict[str, StoredTensor], model: CausalLM) -> None:
    """Phi's checkpoints hold some of the layers merged that ours are: name their rows as other checkpoints do."""
    for path, layer in _layers(model):
        siblings = defaultdict(list)
        for part in layer.parts():
            if part.sibling is not None:
                siblings[f"{path}.{part.name}"].append(part)
        for merged_name, parts in siblings.items():
            merged = tensors.pop(merged_name, None)
            if merged is None:
                continue
            names = [f"{path.rpartition('.')[0]}.{part.sibling}.{part.name}" for part in parts]
            if all(part.fits(merged.shape) for part in parts):  # a scale for all of them
                for name in names:
                    _add(tensors, name, replace(merged, name=name))
                continue
            num_rows = sum(part.full_shape[0] for part in parts)
            _check_shape(merged, replace(parts[0], full_shape=(num_rows, *parts[0].full_shape[1:])))
            first_row = 0
            for name, part in zip(names, parts, strict=True):
                shape = part.full_shape[0], *merged.shape[1:]
                _add(tensors, name, replace(merged, name=name, shape=shape, first_row=first_row))
                first_row += part.full_shape[0]


def _check_names(checkpoint: Checkpoint, parts: dict[str, Part], architecture: str) -> None:
    missing = [name for name in parts if name not in checkpoint.tensors]
    if missing:
        raise ModelError(f"{checkpoint.folder} lacks {_named(missing)}: weights and config.json don't belong together")
    unknown = [t for name, t in checkpoint.tensors.items() if name not in parts and not _NEEDLESS.search(name)]
    if unknown:
        raise ModelError(
            f"{unknown[0].file} holds {_named([t.key for t in unknown])}, which {architecture} with this config.json "
            "doesn't have"
        )


def _check_kinds(checkpoint: Checkpoint, parts: dict[str, Part]) -> None:
    for name, part in parts.items():
        stored = checkpoint.tensors[name]
        _check_shape(stored, part)
        if stored.is_fp8 != part.is_fp8:
            wanted = "FP8" if part.is_fp8 else "floats of 16 bits or more"
            raise ModelError(
                f"{stored.file}: {stored.key} is stored as {stored.dtype}, but by config.json's quantization_config "
                f"it has to be in {wanted}"
            )


def _check_shape(stored: StoredTensor, part: Part) -> None:
    if not part.fits(stored.shape):
        raise ModelError(
            f"{stored.file}: {stored.key} has the shape {list(stored.shape)}, but config.json asks for "
            f"{list(part.full_shape)}"
        )


def _check_numbers(checkpoint: Checkpoint, model: CausalLM, parts: dict[str, Part]) -> None:
    """Refuse NaN and infinite numbers, which would make every answer garbage.

    Whole parameters are looked at, where they are, with one wait for the device; parts only to name the faulty one.
    """
    if bool(torch.stack([_is_finite(parameter) for parameter in model.parameters()]).all()):
        return
    for name, part in parts.items():
        if not _is_finite(part.target):
            stored, dtype = checkpoint.tensors[name], str(part.dtype).removeprefix("torch.")
            raise ModelError(
                f"{stored.file}: {stored.key} holds NaN or infinite numbers, as {dtype}: "
                "the file is damaged, its training diverged, or its numbers are too large for this dtype"
            )


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """() bool. A contiguous tensor isn't copied, not even as bools."""
    if tensor.dtype == torch.float8_e4m3fn:  # NaN is 0x7f and 0xff, the largest signed and the largest unsigned byte
        return (tensor.view(torch.int8).amax() < 0x7F) & (tensor.view(torch.uint8).amax() < 0xFF)
    lowest, highest = tensor.aminmax()  # NaN if one is
    return lowest.isfinite() & highest.isfinite()


def _named(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more tensors" if more > 0 else "")
