"""Text models that stand beside one for images: what their files say, and how their tensors are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config

from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.errors import ModelError
from minisgl_batch.models.config import load_model_config
from minisgl_batch.tokenizer.model_defaults import read_model_defaults
from tests.minisgl_batch.models import ranks
from tests.minisgl_batch.models.hf import random_model, random_sequences, save

# As Gemma 3 4B's file has them: what has a default isn't there.
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_a_file_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    ours = load_model_config(write(tmp_path, GEMMA))
    theirs = Gemma3Config(**GEMMA).text_config
    assert (ours.num_layers, ours.hidden_size, ours.intermediate_size) == (34, 2560, 10240)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.head_dim, ours.vocab_size) == (theirs.head_dim, theirs.vocab_size)
    assert ours.context_len == theirs.max_position_embeddings
    assert (ours.rope.type, ours.rope.factor) == ("linear", 8.0)
    assert [w is not None for w in ours.sliding_window] == [t == "sliding_attention" for t in theirs.layer_types]
    assert (ours.dtype, ours.tie_word_embeddings) == ("bfloat16", True)
    defaults = read_model_defaults(tmp_path)
    assert (defaults.max_len, defaults.vocab_size) == (ours.context_len, ours.vocab_size)
    assert defaults.eos_ids == {1, 106}


def test_what_a_file_leaves_out_altogether_is_as_in_transformers(tmp_path: Path) -> None:
    ours = load_model_config(write(tmp_path, GEMMA | {"text_config": {"model_type": "gemma3_text"}}))
    theirs = Gemma3Config().text_config
    assert (ours.num_layers, ours.hidden_size) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert (ours.intermediate_size, ours.num_heads) == (theirs.intermediate_size, theirs.num_attention_heads)


def test_a_fault_is_named_where_it_stands(tmp_path: Path) -> None:
    text = GEMMA["text_config"] | {"hidden_size": "wide"}
    with pytest.raises(ModelError, match=r"config\.json: text_config\.hidden_size: must be a whole number"):
        load_model_config(write(tmp_path, GEMMA | {"text_config": text}))


@pytest.mark.parametrize("architecture", ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_other_models_that_read_images_are_refused(architecture: str, tmp_path: Path) -> None:
    config = GEMMA | {"architectures": [architecture], "text_config": {"model_type": "llama"}}
    with pytest.raises(ModelError, match="vision_config: models that read images aren't supported"):
        load_model_config(write(tmp_path, config))


def test_tensors_under_newer_names(tmp_path: Path) -> None:
    folder = save(random_model("mistral3", tie_word_embeddings=False), tmp_path)
    sequences = random_sequences(load_model_config(folder).vocab_size, [7])
    _, want = ranks.logits_of_checkpoint(SINGLE, folder, sequences, [3])
    tensors = load_file(folder / "model.safetensors")
    assert "language_model.lm_head.weight" in tensors
    renamed = {
        "lm_head.weight" if key == "language_model.lm_head.weight"
        else f"model.{key.replace('language_model.model.', 'language_model.')}": tensor
        for key, tensor in tensors.items()
    }  # fmt: skip
    save_file(renamed, folder / "model.safetensors")
    _, got = ranks.logits_of_checkpoint(SINGLE, folder, sequences, [3])
    assert torch.equal(got[0], want[0])
