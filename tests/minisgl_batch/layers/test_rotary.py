"""Rotary embeddings against complex rotations, and their tables against transformers'."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl_batch.layers.rope_config import RopeConfig, yarn_attention_factor
from minisgl_batch.layers.rotary import RotaryEmbedding
from minisgl_kernels.reference import rotate

HEAD_DIM, CONTEXT_LEN = 64, 4096
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_rotation_is_complex_multiplication() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=100.0), 10, 50, dtype=torch.float32)
    positions = torch.randint(0, 50, (6,), dtype=torch.int32)
    x = torch.randn(6, 3, 10)
    angles = positions[:, None, None] * 100.0 ** -(torch.arange(5) / 5)
    turned = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, rotary(positions).rope)
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rope_type", "theirs", "ours"),
    [
        ("default", {}, {}),
        ("linear", {"factor": 3.0}, {"factor": 3.0}),
        ("llama3", {"factor": 8.0} | LLAMA3, {"factor": 8.0, "original_context_len": 512} | LLAMA3),
        (
            "yarn",
            {"factor": 8.0},
            {"factor": 8.0, "original_context_len": 512, "attention_factor": yarn_attention_factor(8.0)},
        ),
        (
            "yarn",
            {"factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 0.8},
            {
                "factor": 8.0,
                "original_context_len": 512,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 0.8,
            },
        ),
        (
            "yarn",
            {"factor": 8.0, "truncate": False, "attention_factor": 1.0},
            {"factor": 8.0, "original_context_len": 512, "truncate": False},
        ),
        (
            "yarn",
            {"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.4},
            {
                "factor": 8.0,
                "original_context_len": 512,
                "attention_factor": yarn_attention_factor(8.0, 0.7, 1.4),
            },
        ),
    ],
)
def test_tables_equal_those_of_transformers(rope_type: Any, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    if "truncate" in theirs and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("older versions of transformers always truncate")
    theta = random.choice((500.0, 10000.0, 1e6))
    scaling = {"rope_type": rope_type, **theirs}
    if rope_type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = 512
    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=CONTEXT_LEN,
        rope_theta=theta,
        rope_scaling=scaling if rope_type != "default" else None,
    )
    positions = torch.arange(CONTEXT_LEN)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))

    rotary = RotaryEmbedding(
        RopeConfig(theta=theta, type=rope_type, **ours), HEAD_DIM, CONTEXT_LEN, dtype=torch.float32
    )

    sign = torch.tensor([-1.0, 1.0]).repeat_interleave(HEAD_DIM // 2)
    want = torch.stack((cos[0], sin[0] * sign), dim=1)
    torch.testing.assert_close(rotary.table, want, atol=2e-3, rtol=0)  # an ulp of a frequency at position 4095
    torch.testing.assert_close(rotary.table[:100], want[:100], atol=2e-5, rtol=0)


def test_without_scaling_down_attention_is_left_alone() -> None:
    assert yarn_attention_factor(1.0) == yarn_attention_factor(0.5) == 1.0
    assert yarn_attention_factor(4.0, mscale=0.0, mscale_all_dim=1.0) == yarn_attention_factor(4.0)


def test_bfloat16_rows_are_rounded_from_float32() -> None:
    wide, rounded = (RotaryEmbedding(RopeConfig(), 8, 100, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    positions = torch.tensor([99, 3, 99], dtype=torch.int32)
    assert torch.equal(rounded(positions).rope, wide.table[[99, 3, 99]].bfloat16())
