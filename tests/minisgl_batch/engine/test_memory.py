"""The books on memory before the KV pool is made."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from minisgl_batch.bench import SHAPES
from minisgl_batch.config import EngineConfig
from minisgl_batch.engine import memory, options
from minisgl_batch.engine.engine import Engine
from minisgl_batch.engine.memory import check_balance
from minisgl_batch.errors import InvalidParameterError, ModelError
from minisgl_batch.models.config import load_model_config

GIB = 1 << 30


@pytest.mark.parametrize("available", [[5], [0, 0], [100 * GIB, 81 * GIB], [81 * GIB, 100 * GIB, 90 * GIB]])
def test_ranks_with_similar_memory_pass(available: list[int]) -> None:
    check_balance(available)


def test_a_rank_with_little_memory_is_named() -> None:
    with pytest.raises(ModelError, match=r"rank 1 has 70\.0 GiB .* rank 2 has 100\.0 GiB"):
        check_balance([90 * GIB, 70 * GIB, 100 * GIB])


def test_a_step_has_room_for_the_rows_of_all_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a prefill step is a row of 8 experts, between and behind their two products."""
    monkeypatch.setattr(options, "pick_device", lambda *_: torch.device("cuda"))
    sizes = []
    for moe_width in (768, 1768):
        shape = SHAPES["qwen3-30b-a3b"] | {"moe_intermediate_size": moe_width}
        (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        model = load_model_config(tmp_path)
        config = EngineConfig(model="some", max_prefill_tokens=4096, dtype="bfloat16", attention_backend="triton")
        sizes.append(memory.step_bytes(model, options.resolve(config, model)))
    least = 4096 * 8 * 2
    assert sizes[0] > memory.GPU_WORKSPACE_BYTES + least * (768 + 2048)
    assert least * 1000 <= sizes[1] - sizes[0] < 2 * least * 1000


def test_a_pool_smaller_than_the_context_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Engine(EngineConfig(model="demo", device="cpu", num_pages=4, page_size=16, max_seq_len=64))
    Engine(EngineConfig(model="demo", device="cpu", num_pages=4, page_size=16))
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith("the KV cache has room for 64 tokens, and the model's context is 2048: longer rows")
    assert "num_pages" in message


@pytest.mark.parametrize("field", ["num_pages", "max_running"])
def test_what_no_machine_can_hold_is_refused_by_name(field: str) -> None:
    given = {"num_pages": 64, field: 1 << 31}
    with pytest.raises(InvalidParameterError, match=r"2,147,483,648 of them would take .* GiB, and this machine has"):
        Engine(EngineConfig(model="demo", device="cpu", **given))
