"""What the engine's options come to for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_batch.attention.registry import AttnShapes
from minisgl_batch.config import EngineConfig
from minisgl_batch.engine import options
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.models.config import ModelConfig, load_model_config

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def config_of(folder: Path, architecture: str, **keys: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SIZES | {"architectures": [architecture]} | keys))
    return load_model_config(folder)


def test_gemma_is_refused_in_float16(tmp_path: Path) -> None:
    config = config_of(tmp_path, "Gemma3ForCausalLM", head_dim=16)
    with pytest.raises(InvalidParameterError, match=r"float16 can't hold .*Gemma3ForCausalLM.*use bfloat16"):
        options.resolve(EngineConfig(model="some", dtype="float16", device="cpu"), config)
    assert options.resolve(EngineConfig(model="some", dtype="bfloat16", device="cpu"), config).dtype == torch.bfloat16
    other = config_of(tmp_path, "LlamaForCausalLM")
    assert options.resolve(EngineConfig(model="some", dtype="float16", device="cpu"), other).dtype == torch.float16


@pytest.mark.parametrize(("max_seq_len", "has_window"), [(None, True), (21, True), (20, False)])
def test_backends_hear_of_windows_that_rows_outgrow(
    max_seq_len: int | None, has_window: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[AttnShapes] = []
    monkeypatch.setattr(options, "resolve_backend", lambda *given: asked.append(given[-1]))
    config = config_of(tmp_path, "MistralForCausalLM", sliding_window=20, max_position_embeddings=50)
    options.resolve(EngineConfig(model="some", max_seq_len=max_seq_len, device="cpu"), config)
    assert [shapes.has_window for shapes in asked] == [has_window]
