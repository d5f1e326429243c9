"""Models that can't be run, known by a key of their config.json or by a file beside it; each refusal says what to do.

Knows nothing of the architectures that can be run. Called by `config`.
"""

from __future__ import annotations

from minisgl_batch.errors import ModelError
from minisgl_batch.models.config_file import ConfigFile

SENTENCE_TRANSFORMERS = "modules.json"
_OTHER_INPUTS = {
    "vision_config": "images",
    "visual": "images",
    "mm_vision_tower": "images",
    "vision_lora": "images",
    "audio_config": "sound",
}
_NO_GENERATORS = ("Model", "ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")


def refuse_unsupported(file: ConfigFile) -> None:
    """
    Raises:
        ModelError: the model reads more than text, or makes no text token by token; names the file and the key.
    """
    for key, what in _OTHER_INPUTS.items():
        if file.data.get(key):
            raise file.error(key, f"models that read {what} aren't supported: use one that reads text alone")
    if file.flag("is_encoder_decoder", False):
        raise file.error("is_encoder_decoder", "models with an encoder aren't supported: use a decoder-only one")
    modules = file.path.parent / SENTENCE_TRANSFORMERS
    if modules.is_file():
        raise ModelError(
            f"{modules}: embedding models (sentence-transformers) aren't supported: use one that generates text"
        )


def refuse_quantized(file: ConfigFile, supported: tuple[str, ...]) -> None:
    """
    Args:
        supported: the quantizations that can be read.

    Raises:
        ModelError: the model is quantized in another way; names the file and the key.
    """
    for key in ("quantization_config", "compression_config"):
        config = file.data.get(key)
        if config and _quantization(config) not in supported:
            raise file.error(
                key,
                f"quantized checkpoints ({_quantization(config)}) aren't supported: use the one that this was made "
                "from, in bfloat16, float16 or float32",
            )


def why_not(architecture: str) -> str:
    """What is to be said of an unknown architecture besides the known ones: "" or a clause."""
    if architecture.endswith(_NO_GENERATORS):
        return " (embedding, encoder and classification models generate no text)"
    return ""


def _quantization(config: object) -> str:
    if not isinstance(config, dict):
        return str(config)
    is_bitsandbytes = any(key in config for key in ("load_in_4bit", "load_in_8bit"))
    return str(config.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "of an unnamed method"))
