"""Reads the rotary embedding's parameters out of a config.json, in the spellings of transformers 4.5x and 5.x."""

from __future__ import annotations

from typing import cast

from minisgl_batch.layers.rope_config import ROPE_TYPES, RopeConfig, RopeType, yarn_attention_factor
from minisgl_batch.models.config_file import ConfigFile


def read_rope(file: ConfigFile, max_position_embeddings: int, default_theta: float) -> RopeConfig:
    """From `rope_parameters` (5.x), or from `rope_theta` and `rope_scaling` (4.5x).

    Raises:
        ModelError: the type isn't supported, or lacks a parameter; names the file and the key.
    """
    _refuse_partial(file)
    params = file.child("rope_scaling") or file.child("rope_parameters")
    if params is None:
        return RopeConfig(theta=_theta(file, default_theta))
    _refuse_partial(params)
    for key, value in params.data.items():
        if isinstance(value, dict):
            raise params.error(key, "rotary parameters per layer type aren't supported")
    theta = _theta(params, _theta(file, default_theta))
    rope_type = cast(RopeType, params.choice(params.either("rope_type", "type"), ROPE_TYPES, "default"))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(theta=theta, type="linear", factor=_factor(params))
    original_context_len = (
        file.count("original_max_position_embeddings")
        if file.data.get("original_max_position_embeddings") is not None
        else params.count("original_max_position_embeddings", max_position_embeddings)
    )
    if rope_type == "llama3":
        return _llama3(params, theta, original_context_len)
    return _yarn(params, theta, original_context_len, max_position_embeddings)


def _llama3(params: ConfigFile, theta: float, original_context_len: int) -> RopeConfig:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if high <= low:
        raise params.error("high_freq_factor", f"must be greater than low_freq_factor ({low:g}), got {high:g}")
    return RopeConfig(
        theta=theta,
        type="llama3",
        factor=_factor(params),
        original_context_len=original_context_len,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(params: ConfigFile, theta: float, original_context_len: int, max_position_embeddings: int) -> RopeConfig:
    # A null factor means the ratio of the two context lengths (DeepSeek's configs).
    factor = _factor(params, max_position_embeddings / original_context_len)
    recommended = yarn_attention_factor(factor, params.number("mscale", 0.0), params.number("mscale_all_dim", 0.0))
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_context_len=original_context_len,
        beta_fast=params.number("beta_fast", 0.0) or 32.0,
        beta_slow=params.number("beta_slow", 0.0) or 1.0,
        truncate=params.flag("truncate", True),
        attention_factor=params.number("attention_factor", recommended),
    )


def _factor(params: ConfigFile, default: float | None = None) -> float:
    factor = params.number("factor", default)
    if factor <= 0.0:
        raise params.error("factor", f"must be greater than 0, got {factor:g}")
    return factor


def _theta(params: ConfigFile, default: float) -> float:
    theta = params.number("rope_theta", default)
    if theta <= 1.0:
        raise params.error("rope_theta", f"must be greater than 1, got {theta:g}")
    return theta


def _refuse_partial(params: ConfigFile) -> None:
    if params.number("partial_rotary_factor", 1.0) != 1.0:
        raise params.error("partial_rotary_factor", "rotating a part of each head isn't supported")
