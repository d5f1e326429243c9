"""Scaled rotary embeddings against transformers, at four times the context that the model was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import load_weights
from minisgl_batch.tokenizer.model_defaults import read_model_defaults
from tests.minisgl_batch.engine.served import Served
from tests.minisgl_batch.models.contiguous import sequence_logits
from tests.minisgl_batch.models.hf import hf_logits, random_model, random_sequences, save

ORIGINAL_LEN = 64
LEN = 4 * ORIGINAL_LEN
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LEN}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_LEN,
}
LONGROPE = {
    "head_dim": 16,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": LEN,
    "original_max_position_embeddings": ORIGINAL_LEN,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.5],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 5.0, 6.0],
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": (
        "llama",  # with wavelengths in all three ranges
        {"rope_scaling": LLAMA3, "max_position_embeddings": LEN, "head_dim": 16, "rope_theta": 500.0},
    ),
    "yarn": ("qwen3", {"rope_scaling": YARN}),
    "yarn with attention_factor": ("qwen2", {"rope_scaling": YARN | {"attention_factor": 0.7}}),
    "yarn with mscale": ("mistral", {"rope_scaling": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6}}),
    "yarn with scaled queries": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.6}}),
    "yarn, windows and sinks": (
        "gpt_oss",
        {"rope_scaling": YARN | {"truncate": False}, "sliding_window": 60, "head_dim": 16},
    ),
    "longrope": ("phi3", LONGROPE),
    "longrope with attention_factor": (
        "phi3",
        LONGROPE | {"rope_scaling": LONGROPE["rope_scaling"] | {"attention_factor": 1.4}},  # type: ignore[operator]
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_long_sequences_have_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    family, given = CASES[case]
    reference = random_model(family, **given)
    config = load_model_config(save(reference, tmp_path))
    assert config.context_len == LEN == read_model_defaults(tmp_path).max_len
    model = make_model(config, SINGLE, torch.float32, torch.device("cpu"))
    load_weights(model, tmp_path)
    sequences = random_sequences(config.vocab_size, [LEN, ORIGINAL_LEN + 1])

    ours = sequence_logits(model, sequences, [LEN - 1, 1])

    for got, want in zip(ours, hf_logits(reference, sequences), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_seq_len", [ORIGINAL_LEN, LEN])
def test_longrope_takes_the_factors_of_the_longest_sequence_it_serves(max_seq_len: int, tmp_path: Path) -> None:
    reference = random_model("phi3", **LONGROPE)
    served = Served(save(reference, tmp_path), max_seq_len=max_seq_len)
    (prompt,) = random_sequences(reference.config.vocab_size, [max_seq_len - 1])
    served.run([prompt], max_tokens=1)
    torch.testing.assert_close(served.logits[0][0], hf_logits(reference, [prompt])[0][-1], atol=1e-4, rtol=1e-4)
