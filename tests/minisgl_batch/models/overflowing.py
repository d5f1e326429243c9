"""The demo model, changed so that its numbers overflow in float16 where a text has a certain character."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from minisgl_batch.hub import DEMO_MODEL, model_path

SPOILER = "~"


def save_overflowing(folder: Path) -> Path:
    """The model in `folder`, which isn't there yet; what it says makes no sense any more."""
    shutil.copytree(model_path(DEMO_MODEL), folder)
    (token,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SPOILER).ids
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][token] = 65_000.0  # float16 ends at 65,504
    weights["model.layers.0.mlp.down_proj.weight"] *= 300.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder
