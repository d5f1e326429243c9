"""Gets a model's files before engines and tokenizers read them. Called by whoever makes these."""

from __future__ import annotations

from dataclasses import replace

from minisgl_batch.config import EngineConfig
from minisgl_batch.hub import folder_of, model_path
from minisgl_batch.models.config import load_model_config


def fetch_model(config: EngineConfig) -> EngineConfig:
    """The options with the model in a folder here, where a hub id is downloaded to.

    Raises:
        ModelError: there is no such model, or it can't be run; its weights aren't downloaded then.
        InvalidParameterError: it can't be split over so many ranks, or has no revisions.
    """
    load_model_config(model_path(config.model, config.revision, weights=False)).check_tp_size(config.tp)
    return replace(config, model=folder_of(config.model, config.revision), revision=None)
