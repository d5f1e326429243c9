"""Tiny random models of transformers, which ours are compared with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FAMILIES: dict[str, tuple[type, type]] = {
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}
# Name -> (the text model's family, the whole's config, the whole)
WITH_IMAGES: dict[str, tuple[str, type, type]] = {
    "gemma3, with images": ("gemma3", Gemma3Config, Gemma3ForConditionalGeneration),
    "mistral3": ("mistral", Mistral3Config, Mistral3ForConditionalGeneration),
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
MOE_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")


def random_model(family: str, **given: Any) -> PreTrainedModel:
    """A float32 model of random sizes, but for those given; every parameter is random, norms and biases too.

    Args:
        text_family: of the text model beside one for images, where there is a choice.
    """
    if family in WITH_IMAGES:
        text_family, config_class, model_class = WITH_IMAGES[family]
        text = random_config(given.pop("text_family", text_family), **given)
        tied = {"tie_word_embeddings": text.tie_word_embeddings}
        config = config_class(text_config=text, vision_config=VISION, attn_implementation="eager", **tied)
    else:
        model_class, config = FAMILIES[family][1], random_config(family, **given)
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    return model


def random_config(family: str, **given: Any) -> PreTrainedConfig:
    """That of `random_model`."""
    num_kv_heads = random.choice((1, 2, 3))
    num_heads = num_kv_heads * random.choice((1, 2, 4))
    head_dim = random.choice((6, 8, 10))
    sizes = {
        "hidden_size": num_heads * head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": random.randrange(20, 60),
        "num_hidden_layers": random.choice((2, 3)),
        "vocab_size": random.randrange(50, 200),
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": random.choice((500.0, 10000.0, 1e6)),
        "tie_word_embeddings": random.random() < 0.5,
        "attn_implementation": "eager",
        "pad_token_id": None,  # else an embedding of it must be there
        "experts_implementation": "eager",  # the others want aligned sizes
    }
    if family in ("gemma3", "gpt_oss", "ministral", "qwen3", "qwen3_moe"):
        sizes["head_dim"] = 2 * random.randrange(2, 9)
    if family in MOE_FAMILIES:
        sizes["num_experts"] = num_experts = random.randrange(2, 9)
        sizes["num_experts_per_tok"] = random.randint(1, num_experts)
    if family in ("qwen2_moe", "qwen3_moe"):
        sizes["moe_intermediate_size"] = random.randrange(10, 40)
        sizes["norm_topk_prob"] = random.random() < 0.5
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = random.randrange(10, 40)
    config: PreTrainedConfig = FAMILIES[family][0](**(sizes | given))
    return config


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """The folder, with config.json and safetensors files."""
    model.save_pretrained(folder, **options)
    return folder


def random_sequences(vocab_size: int, lengths: list[int]) -> list[list[int]]:
    return [[random.randrange(vocab_size) for _ in range(n)] for n in lengths]


@torch.no_grad()
def hf_logits(model: PreTrainedModel, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits after every token: one (len, vocab_size) tensor per sequence."""
    return [model(torch.tensor([ids])).logits[0] for ids in sequences]
