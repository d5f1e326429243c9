from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl_batch.errors import ModelError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.tokenizer.model_defaults import read_model_defaults

CONFIG = {"vocab_size": 1000, "max_position_embeddings": 4096}


def write(folder: Path, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        (None, SamplingParams()),
        ({}, SamplingParams()),
        ({"temperature": 0.7, "top_p": None, "top_k": 20}, SamplingParams(temperature=0.7, top_k=20)),
        ({"do_sample": True, "top_p": 0.8, "min_p": 0.1}, SamplingParams(top_p=0.8, min_p=0.1)),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
    ],
)
def test_default_sampling(tmp_path: Path, generation_config: dict[str, Any] | None, expected: SamplingParams) -> None:
    assert read_model_defaults(write(tmp_path, CONFIG, generation_config)).sampling == expected


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({}, None, set()),
        ({"eos_token_id": 0}, None, {0}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": [2, 3]}, {1, 2, 3}),
        ({"eos_token_id": None}, {"eos_token_id": 4}, {4}),
    ],
)
def test_eos_ids(
    tmp_path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None, expected: set[int]
) -> None:
    assert read_model_defaults(write(tmp_path, CONFIG | config, generation_config)).eos_ids == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 4096),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
        ({"rope_scaling": None}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}, 4096),
        ({"rope_scaling": {"type": "su", "long_factor": [2.0]}}, 4096),
        ({"rope_scaling": {"type": "yarn", "long_factor": [2.0], "original_max_position_embeddings": 512}}, 4096),
    ],
)
def test_context_length(tmp_path: Path, rope: dict[str, Any], expected: int) -> None:
    assert read_model_defaults(write(tmp_path, CONFIG | rope)).max_len == expected


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "can't read .*config.json"),
        ("config.json", "[]", "holds no JSON object"),
        ("config.json", '{"vocab_size": 5}', "config.json names no context length"),
        ("config.json", '{"max_position_embeddings": 5}', "config.json names no vocab_size"),
        ("config.json", '{"vocab_size": 5, "n_positions": "9"}', "n_positions must be a number above 0, got '9'"),
        ("config.json", '{"vocab_size": 5, "n_positions": 0}', "n_positions must be a number above 0, got 0"),
        ("config.json", '{"vocab_size": 5, "n_positions": 9, "rope_scaling": [1]}', "rope_scaling must be an object"),
        ("config.json", '{"vocab_size": 5, "n_positions": 9, "rope_scaling": {"factor": "4"}}', "factor must be a num"),
        ("generation_config.json", '{"top_p": 7}', "generation_config.json can't be used: top_p"),
        ("generation_config.json", "\xff", "can't read .*generation_config.json"),
    ],
)
def test_files_that_can_not_be_used(tmp_path: Path, file: str, content: str, says: str) -> None:
    folder = write(tmp_path, CONFIG)
    (folder / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=says) as caught:
        read_model_defaults(folder)
    assert str(folder / file) in str(caught.value)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path} holds no config.json"):
        read_model_defaults(tmp_path)


@pytest.mark.parametrize("eos", ["x", 1.5, True, -5, 2**31, [None], [[1]], {"a": 1}])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_end_tokens_that_are_none_are_named(tmp_path: Path, name: str, eos: object) -> None:
    said = {"eos_token_id": eos}
    config, generation = (CONFIG | said, None) if name == "config" else (CONFIG, said)
    with pytest.raises(ModelError, match=rf"{name}.json: eos_token_id: must be a token id.*got {re.escape(repr(eos))}"):
        read_model_defaults(write(tmp_path, config, generation))


def test_files_nested_too_deeply_are_named(tmp_path: Path) -> None:
    write(tmp_path, CONFIG)
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"can't read .*generation_config\.json"):
        read_model_defaults(tmp_path)
