"""What Gemma 3's config.json says beyond the keys that all architectures have. Knows nothing of torch.

Called by `families`. Text models only: what reads images has another architecture.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl_batch.models.config_file import ConfigFile

if TYPE_CHECKING:
    from minisgl_batch.models.config import ModelConfig

DEFAULT_QUERY_SCALAR = 256.0
DEFAULT_PATTERN = 6  # every so manyth layer sees all tokens


def read_gemma3(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    """`config` with what is Gemma's own.

    Raises:
        ModelError: the file asks for something that isn't supported; names it and the key.
    """
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if file.data.get(key) is not None:
            raise file.error(key, "softcapping isn't supported")
    if file.flag("use_bidirectional_attention", False):
        raise file.error("use_bidirectional_attention", "models whose tokens see later ones aren't supported")
    scalar = file.number("query_pre_attn_scalar", DEFAULT_QUERY_SCALAR)
    if scalar == 0.0:
        raise file.error("query_pre_attn_scalar", "must be greater than 0")
    return replace(
        config,
        attention_scale=scalar**-0.5,
        embedding_scale=math.sqrt(config.hidden_size),
        norm_offset=1.0,
        has_post_norms=True,
    )


def gemma3_layer_types(file: ConfigFile, num_layers: int) -> list[str]:
    """The types of layers where `layer_types` doesn't say them."""
    pattern = file.count("sliding_window_pattern", DEFAULT_PATTERN)
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
