"""Mixtures of experts in config.json: which layers are sparse, defaults, refusals, and what ranks can share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl_batch.errors import InvalidParameterError, ModelError
from minisgl_batch.models.config import ModelConfig
from minisgl_batch.models.moe_config import MoEConfig
from tests.minisgl_batch.models.hf import FAMILIES, MOE_FAMILIES
from tests.minisgl_batch.models.test_config import parse


def parse_as(folder: Path, family: str, **changes: Any) -> ModelConfig:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    return parse(folder, architectures=[FAMILIES[family][1].__name__], **(heads | changes))


def parse_moe(folder: Path, family: str, **changes: Any) -> MoEConfig:
    moe = parse_as(folder, family, **changes).moe
    assert moe is not None
    return moe


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_defaults_equal_those_of_transformers_config_classes(family: str, tmp_path: Path) -> None:
    reference = FAMILIES[family][0]()
    ours = parse_moe(tmp_path, family, intermediate_size=reference.intermediate_size)
    assert ours.num_experts == reference.num_experts
    assert ours.top_k == reference.num_experts_per_tok
    assert ours.intermediate_size == getattr(reference, "moe_intermediate_size", reference.intermediate_size)
    assert ours.shared_intermediate_size == getattr(reference, "shared_expert_intermediate_size", None)
    assert ours.renormalize == getattr(reference, "norm_topk_prob", True)
    if family == "gpt_oss":
        assert ours.clamped_swiglu == (reference.swiglu_alpha, reference.swiglu_limit)
    assert all(ours.is_sparse)


def test_mixtral_has_a_rotary_base_of_its_own(tmp_path: Path) -> None:
    assert parse_as(tmp_path, "mixtral").rope.theta == 1e6
    assert parse_as(tmp_path, "mixtral", rope_theta=5.0).rope.theta == 5.0


def test_both_names_of_the_number_of_experts(tmp_path: Path) -> None:
    assert parse_moe(tmp_path, "qwen3_moe", num_experts=16).num_experts == 16
    assert parse_moe(tmp_path, "qwen3_moe", num_local_experts=16).num_experts == 16


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({}, "1111"),
        ({"mlp_only_layers": []}, "1111"),
        ({"mlp_only_layers": [0, 2]}, "0101"),
        ({"decoder_sparse_step": 2}, "0101"),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [1]}, "0010"),
    ],
)
def test_which_layers_are_sparse(keys: dict[str, Any], sparse: str, tmp_path: Path) -> None:
    config = parse_as(tmp_path, "qwen2_moe", **keys)
    assert [config.is_sparse(layer) for layer in range(4)] == [mark == "1" for mark in sparse]
    assert not any(parse(tmp_path).is_sparse(layer) for layer in range(4))


@pytest.mark.parametrize(
    ("family", "keys", "valid"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 12, "intermediate_size": 7}, "1, 2, 4"),
        ("qwen3_moe", {"moe_intermediate_size": 12, "intermediate_size": 10, "mlp_only_layers": [3]}, "1, 2"),
        ("qwen2_moe", {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 6}, "1, 2"),
        ("mixtral", {"intermediate_size": 24}, "1, 2, 4, 8"),
    ],
)
def test_ranks_share_the_experts_that_there_are(family: str, keys: dict[str, Any], valid: str, tmp_path: Path) -> None:
    config = parse_as(tmp_path, family, **keys)
    with pytest.raises(InvalidParameterError, match=rf"valid sizes: {valid}$"):
        config.check_tp_size(3)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "more than there are": ({"num_experts": 4}, r"num_experts_per_tok: 8 is more than the 4 experts"),
    "no experts": ({"num_experts": 0}, r"num_experts: must be a whole number between 1 and"),
    "no such layer": ({"mlp_only_layers": [4]}, r"mlp_only_layers: must be a list of layers from 0 to 3"),
    "no list": ({"mlp_only_layers": 1}, r"mlp_only_layers: must be a list of layers"),
    "window": ({"use_sliding_window": True}, r"use_sliding_window: isn't supported"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_file_and_key(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        parse_as(tmp_path, "qwen3_moe", **changes)
