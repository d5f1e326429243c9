"""What a model folder's JSON files say about serving: context length, end-of-sequence ids, default sampling.

Reads config.json and generation_config.json as they lie on disk. Knows nothing of tokenizers, which may add
end-of-sequence ids of their own. Called by `ModelTokenizer.load`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_batch.errors import InvalidParameterError, ModelError
from minisgl_batch.sampling_params import MAX_TOKEN_ID, MAX_TOKENS_LIMIT, SamplingParams
from minisgl_batch.text_part import text_part

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# These state a context that max_position_embeddings already counts; the other scaled types multiply it.
SELF_CONTAINED_ROPE_TYPES = ("default", "llama3", "longrope", "su", "mrope")


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What the folder's files say.

    Attributes:
        max_len: the model's context in tokens, rope scaling included.
        vocab_size: rows of the embedding; ids must be below it.
        eos_ids: of config.json and generation_config.json together.
        sampling: the publisher's recommendation; nothing is set where the files say nothing.
    """

    max_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    sampling: SamplingParams


def read_model_defaults(folder: Path) -> ModelDefaults:
    """Read the folder's config.json and, where there is one, its generation_config.json.

    Raises:
        ModelError: config.json is missing or lacks what is needed, or a file can't be used; names the file.
    """
    config_file, generation_file = folder / "config.json", folder / "generation_config.json"
    if not config_file.is_file():
        raise ModelError(f"{folder} holds no config.json: give a model folder in Hugging Face format")
    config = text_part(_read_json(config_file))
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelError(f"{config_file} names no vocab_size")
    return ModelDefaults(
        max_len=_context_length(config, config_file),
        vocab_size=vocab_size,
        eos_ids=_eos_ids(config, config_file) | _eos_ids(generation, generation_file),
        sampling=_default_sampling(generation, generation_file),
    )


def _context_length(config: dict[str, Any], file: Path) -> int:
    """The context that vLLM derives: linear and dynamic scaling multiply it, yarn multiplies the original one."""
    key = next((key for key in CONTEXT_KEYS if config.get(key) is not None), None)
    if key is None:
        raise ModelError(f"{file} names no context length: it has none of {', '.join(CONTEXT_KEYS)}")
    length = _number(config, key, 1, file)
    # transformers 5 writes rope_parameters, 4.x rope_scaling; older files say "type" for "rope_type".
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{file}: rope_scaling must be an object, got {str(rope)[:100]}")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    factor = _number(rope, "factor", 1.0, file)
    # Phi's longrope was once called "yarn". Gemma's configs count the scaling, which only some of its layers have.
    if rope_type in SELF_CONTAINED_ROPE_TYPES or "long_factor" in rope or "rope_local_base_freq" in config:
        return int(length)
    if rope_type == "yarn":
        source = config if config.get("original_max_position_embeddings") else rope
        return max(int(length), int(_number(source, "original_max_position_embeddings", length, file) * factor))
    return int(length * factor)


def _number(values: dict[str, Any], key: str, default: float, file: Path) -> float:
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_TOKENS_LIMIT:
        raise ModelError(f"{file}: {key} must be a number above 0, got {repr(value)[:100]}")
    return value


def _eos_ids(config: dict[str, Any], file: Path) -> frozenset[int]:
    eos = config.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token_id in ids:
        # -1 stands for "none" in some models.
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not -1 <= token_id <= MAX_TOKEN_ID:
            raise ModelError(f"{file}: eos_token_id: must be a token id or a list of them, got {repr(eos)[:100]}")
    return frozenset(ids) - {-1}


def _default_sampling(generation: dict[str, Any], file: Path) -> SamplingParams:
    given = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except InvalidParameterError as error:
        raise ModelError(f"{file} can't be used: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"can't read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"can't read {file}: it holds no JSON object")
    return content
