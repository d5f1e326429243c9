"""Every architecture and variant against transformers: equal logits for a ragged batch, in two steps."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_batch.attention.base import AttentionBackend, ForwardContext
from minisgl_batch.batch import ForwardBatch
from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.models.base import CausalLM
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import load_weights
from tests.minisgl_batch.distributed.lone_rank import lone_rank
from tests.minisgl_batch.models.contiguous import flat_pool, sequence_logits
from tests.minisgl_batch.models.hf import hf_logits, random_model, random_sequences, save

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

GEMMA = {
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 20,
}
GPT_OSS = {"sliding_window": 7, "num_hidden_layers": 3}  # windows in the first and the third
PARTIAL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "partial_rotary_factor": 0.75}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {}),
    "gemma3, windows and global layers": ("gemma3", GEMMA),
    "gemma3, untied and biased": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3, linear rope": ("gemma3", GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, windows": ("gpt_oss", GPT_OSS),
    "gpt_oss, windows in upper layers": (
        "gpt_oss",
        GPT_OSS | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "gpt_oss, clamped gates and ups": ("gpt_oss", {"swiglu_limit": 0.05, "swiglu_alpha": 1.3}),
    "gpt_oss, no attention biases": ("gpt_oss", {"attention_bias": False, "rope_scaling": YARN}),
    "gemma3, with images": ("gemma3, with images", GEMMA),
    "mistral3": ("mistral3", {}),
    "mistral3, Ministral 3": (
        "mistral3",
        {"text_family": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.6}},
    ),
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, untied": ("llama", {"tie_word_embeddings": False}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, own head_dim": ("llama", {"head_dim": 12}),
    "llama, linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama, llama3 rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama, yarn": ("llama", {"rope_scaling": YARN}),
    "qwen3, yarn with attention_factor": ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.37}}),
    "qwen2, yarn with mscale": ("qwen2", {"rope_scaling": YARN | {"mscale": 1.3, "mscale_all_dim": 0.6}}),
    "mistral, yarn with betas": ("mistral", {"rope_scaling": YARN | {"beta_fast": 8.0, "beta_slow": 0.5}}),
    "ministral, window": ("ministral", {"sliding_window": 6}),
    "ministral, window in odd layers": (
        "ministral",
        {"num_hidden_layers": 2, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "ministral3, scaled queries": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.6}}),
    "ministral3, window": ("ministral3", {"sliding_window": 6}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 14}),
    "phi3": ("phi3", {}),
    "phi3, window": ("phi3", {"sliding_window": 6}),
    "phi3, a part of each head rotated": ("phi3", PARTIAL),
    "qwen2": ("qwen2", {}),
    "qwen2, window in upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, tied and biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, window in odd layers": (
        "qwen3",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, window": ("mixtral", {"sliding_window": 6}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, no biases, dense second layer": ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, renormalised": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen3_moe, all experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": False}),
    "qwen3_moe, every second layer": ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = make_model(load_model_config(folder), SINGLE, dtype, torch.device("cpu"))
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, given = CASES[case]
    reference = random_model(family, **given)
    if given.get("use_sliding_window") and not hasattr(reference.model, "has_sliding_layers"):
        pytest.skip("this version of transformers has no windows by layer")
    lengths = [1, 40, *(random.randrange(2, 40) for _ in range(4))]
    sequences = random_sequences(reference.config.get_text_config().vocab_size, lengths)
    cuts = [1, 39, *(random.randint(1, n) for n in lengths[2:])]

    ours = sequence_logits(loaded(save(reference, tmp_path)), sequences, cuts)

    for got, want in zip(ours, hf_logits(reference, sequences), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_bfloat16_follows_the_rounding_of_transformers(family: str, tmp_path: Path) -> None:
    """Not equal, as sums round differently, but as near to the exact logits as transformers comes."""
    exact = random_model(family, hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    sequences = random_sequences(exact.config.vocab_size, [30, 17])
    save(exact.bfloat16(), tmp_path)  # rounds the weights, and computes in bfloat16
    rounded = hf_logits(exact, sequences)
    wanted = hf_logits(exact.float(), sequences)

    ours = sequence_logits(loaded(tmp_path, torch.bfloat16), sequences, [30, 3])

    for got, theirs, want in zip(ours, rounded, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).square().mean() < 2.0 * (theirs - want).square().mean()


def test_a_model_on_the_meta_device_has_sizes_only(tmp_path: Path) -> None:
    reference = random_model("llama", tie_word_embeddings=False)
    config = load_model_config(save(reference, tmp_path))
    with torch.device("meta"):
        model = make_model(config, SINGLE, torch.bfloat16)
    assert {p.device.type for p in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters()
    assert not any(p.requires_grad for p in model.parameters())


class Passing(AttentionBackend):
    """Attention that gives each token its own query back."""

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        pass

    def forward(self, q: torch.Tensor, *_: Any) -> torch.Tensor:
        return q


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_a_step_depends_on_no_values(family: str, size: int, tmp_path: Path) -> None:
    """A CUDA graph can hold it: on the meta device, which has no values, reading one back or a shape from one fails."""
    reference = random_model(
        family, num_attention_heads=4, num_key_value_heads=2, vocab_size=99, intermediate_size=32, hidden_size=40
    )
    config = load_model_config(save(reference, tmp_path))
    model = make_model(config, lone_rank(size - 1, size), torch.bfloat16, torch.device("meta"))
    ids = torch.zeros(7, dtype=torch.int32, device="meta")
    step: Any = SimpleNamespace(out_loc=ids, sample_tokens=None)
    hidden = model(ids, ids, ForwardContext(step, Passing(), flat_pool(model, num_tokens=9)))
    assert hidden.shape == (7, 40)
    assert model.gather_logits(model.logits(hidden[:3])).shape == (3, 99)
