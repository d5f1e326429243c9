"""Reads the rotary embedding's parameters out of a config.json, in the spellings of transformers 4.5x and 5.x."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from minisgl_batch.layers.rope_config import (
    ROPE_TYPES,
    RopeConfig,
    RopeType,
    longrope_attention_factor,
    yarn_attention_factor,
)
from minisgl_batch.models.config_file import ConfigFile

MAX_FACTOR = 1e6  # of anything that scales a rotary embedding


def read_rope(
    file: ConfigFile,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float,
    *,
    may_be_partial: bool = False,
    by_layer_type: bool = False,
    may_scale_queries: bool = False,
) -> RopeConfig:
    """From `rope_parameters` (5.x), or from `rope_theta` and `rope_scaling` (4.5x).

    Args:
        may_be_partial: whether the architecture can rotate a part of each head.
        may_scale_queries: whether it can scale them by their position.
        by_layer_type: whether it has other parameters for layers with a window; see `read_local_rope`.

    Raises:
        ModelError: the type isn't supported, or lacks a parameter; names the file and the key.
    """
    params = file.child("rope_scaling") or file.child("rope_parameters")
    if by_layer_type and params is not None:
        params = params.child("full_attention") or params
    fraction = _fraction(params or file, _fraction(file, 1.0, head_dim, may_be_partial), head_dim, may_be_partial)
    default_theta = _theta(file, default_theta)
    if params is None:
        return RopeConfig(theta=default_theta, fraction=fraction)
    rope = _read(params, file, max_position_embeddings, default_theta)
    if rope.type == "longrope":
        num_wavelengths = int(head_dim * fraction) // 2
        for key, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
            if len(factors) != num_wavelengths:
                raise params.error(key, f"must be a list of {num_wavelengths} numbers, got {len(factors)}")
    growth = params.number("llama_4_scaling_beta", 0.0)
    if growth and not may_scale_queries:
        raise params.error("llama_4_scaling_beta", "scaling queries by position isn't supported for this model")
    if growth:
        rope = replace(rope, original_context_len=params.count("original_max_position_embeddings"))
    return replace(rope, fraction=fraction, query_growth=growth)


def read_local_rope(file: ConfigFile, max_position_embeddings: int, default_theta: float | None) -> RopeConfig | None:
    """Of layers with a window: from `rope_parameters.sliding_attention` (5.x) or `rope_local_base_freq` (4.5x).

    None where there is no default: all layers have the same.
    """
    if default_theta is None:
        return None
    params = file.child("rope_parameters")
    params = None if params is None else params.child("sliding_attention")
    theta = _theta(file, default_theta, "rope_local_base_freq")
    return RopeConfig(theta=theta) if params is None else _read(params, file, max_position_embeddings, theta)


def _read(params: ConfigFile, file: ConfigFile, max_position_embeddings: int, default_theta: float) -> RopeConfig:
    for key, value in params.data.items():
        if isinstance(value, dict):
            raise params.error(key, "rotary parameters per layer type aren't supported")
    theta = _theta(params, default_theta)
    rope_type = _type(params)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(theta=theta, type="linear", factor=_factor(params))
    original_context_len = (
        file.count("original_max_position_embeddings", low=2)
        if file.data.get("original_max_position_embeddings") is not None
        else params.count("original_max_position_embeddings", max_position_embeddings, low=2)
    )
    if rope_type == "llama3":
        return _llama3(params, theta, original_context_len)
    if rope_type == "longrope":
        return _longrope(params, theta, original_context_len, max_position_embeddings)
    return _yarn(params, theta, original_context_len, max_position_embeddings)


def _type(params: ConfigFile) -> RopeType:
    key = params.either("rope_type", "type")
    named = params.choice(key, (*ROPE_TYPES, "su"), "default")
    # Phi's first releases called longrope "su", and later "yarn".
    is_longrope = named == "su" or (named == "yarn" and params.data.get("long_factor") is not None)
    return "longrope" if is_longrope else cast(RopeType, named)


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
        beta_fast=params.number("beta_fast", 32.0, low=1e-3, high=MAX_FACTOR),
        beta_slow=params.number("beta_slow", 1.0, low=1e-3, high=MAX_FACTOR),
        truncate=params.flag("truncate", True),
        attention_factor=params.number("attention_factor", recommended),
    )


def _longrope(params: ConfigFile, theta: float, original_context_len: int, max_position_embeddings: int) -> RopeConfig:
    factor = _factor(params, max_position_embeddings / original_context_len)
    recommended = longrope_attention_factor(factor, original_context_len)
    return RopeConfig(
        theta=theta,
        type="longrope",
        factor=factor,
        original_context_len=original_context_len,
        attention_factor=params.number("attention_factor", recommended),
        short_factors=params.numbers("short_factor"),
        long_factors=params.numbers("long_factor"),
    )


def _factor(params: ConfigFile, default: float | None = None) -> float:
    return params.number("factor", default, low=1e-3, high=MAX_FACTOR)


def _theta(params: ConfigFile, default: float, key: str = "rope_theta") -> float:
    theta = params.number(key, default)
    if theta <= 1.0:
        raise params.error(key, f"must be greater than 1, got {theta:g}")
    return theta


def _fraction(params: ConfigFile, default: float, head_dim: int, may_be_partial: bool) -> float:
    fraction = params.number("partial_rotary_factor", default)
    if fraction == 1.0:
        return fraction
    if not may_be_partial:
        raise params.error("partial_rotary_factor", "rotating a part of each head isn't supported for this model")
    rotary_dim = int(head_dim * min(fraction, 1.0))
    if fraction > 1.0 or rotary_dim % 2 or rotary_dim < 2:
        raise params.error("partial_rotary_factor", f"{fraction:g} of {head_dim} dimensions isn't an even number")
    return fraction
