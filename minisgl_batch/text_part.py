"""What the config.json of a model that reads images as well says of its text model, which alone is run here.

Knows nothing of what the keys mean. Read by `models.config` and by the tokenizer's `model_defaults`.
"""

from __future__ import annotations

from typing import Any

# Architecture -> the text models that it may have: `model_type` of its text_config -> architecture.
_TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
}
MODELS_WITH_IMAGES = {
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B and 27B, for text alone",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1 and 3.2, Ministral 3, for text alone",
}
"""Architecture -> published models that have it."""

# What published files leave out because transformers has a default for it.
_DEFAULTS = {
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "rope_local_base_freq": 10000.0,
        "vocab_size": 262208,
    }
}
_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "compression_config")


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's config as if it were a model of its own; `config` itself where that isn't known to work."""
    architectures, text = config.get("architectures"), config.get("text_config")
    if not isinstance(architectures, list) or not architectures or not isinstance(text, dict):
        return config
    kind = str(text.get("model_type"))
    architecture = _TEXT_MODELS.get(str(architectures[0]), {}).get(kind)
    if architecture is None:
        return config
    whole = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    tied = config.get("tie_word_embeddings") if text.get("tie_word_embeddings") is None else text["tie_word_embeddings"]
    return {**_DEFAULTS.get(kind, {}), **text, **whole, "architectures": [architecture], "tie_word_embeddings": tied}
