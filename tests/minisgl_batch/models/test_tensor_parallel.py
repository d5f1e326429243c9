"""A group of ranks computes what one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from tests.minisgl_batch.distributed.lone_rank import lone_rank
from tests.minisgl_batch.distributed.rank_pool import RankPool
from tests.minisgl_batch.models import ranks
from tests.minisgl_batch.models.hf import hf_logits, random_model, random_sequences, save

SIZES = {"hidden_size": 56, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 44}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, odd vocabulary": ("qwen3", {"vocab_size": 8191, "tie_word_embeddings": True}),
    "untied, odd vocabulary": ("mistral", {"vocab_size": 8191, "tie_word_embeddings": False}),
    "biases on both sides": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a KV head per rank": ("qwen2", {"num_key_value_heads": 4}),
    "summed before the norms": (
        "gemma3",
        {"num_hidden_layers": 2, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "merged in the checkpoint, a part of each head rotated": ("phi3", {"partial_rotary_factor": 0.75}),
    "a text model beside one for images": ("gemma3, with images", {"sliding_window": 4}),
    "a text model under another's roof": ("mistral3", {}),
    "a window": ("ministral", {"sliding_window": 5}),
    "scaled queries": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.6,
            }
        },
    ),
    "a rank without tokens": ("llama", {"vocab_size": 9}),
    "experts": ("qwen3_moe", {"moe_intermediate_size": 12, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "a shared expert": ("qwen2_moe", {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}),
    "experts under Mixtral's names": ("mixtral", {}),
    "sinks and windows, experts with biases": ("gpt_oss", {"sliding_window": 5}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_together_give_the_logits_of_one(
    case: str, size: int, rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    family, given = CASES[case]
    reference = random_model(family, **(SIZES | given))
    vocab_size = reference.config.get_text_config().vocab_size
    sequences, cuts = random_sequences(vocab_size, [9, 1, 14]), [5, 1, 13]

    answers = rank_pool(size).run(ranks.logits_of_checkpoint, save(reference, tmp_path), sequences, cuts)

    assert [token for vocab_range, _ in answers for token in vocab_range] == list(range(vocab_size))
    for got, want in zip(answers[0][1], hf_logits(reference, sequences), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for _, other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, answers[0][1], strict=True))


def test_dummy_weights_are_the_same_for_any_group_size(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, seed: int
) -> None:
    reference = random_model("qwen2", **SIZES, vocab_size=131)
    folder = save(reference, tmp_path)
    sequences, cuts = random_sequences(131, [6, 3]), [6, 1]
    single = ranks.logits_of_dummy(SINGLE, folder, seed, sequences, cuts)
    other_seed = ranks.logits_of_dummy(SINGLE, folder, seed + 1, sequences, cuts)
    assert not torch.allclose(single[0], other_seed[0], atol=1e-4)
    for got, want in zip(
        rank_pool(4).run(ranks.logits_of_dummy, folder, seed, sequences, cuts)[0], single, strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_ranks_hold_their_share_only(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    reference = random_model("llama", **SIZES, vocab_size=1000, tie_word_embeddings=False)
    counts = rank_pool(4).run(ranks.parameter_count, save(reference, tmp_path))
    whole = reference.num_parameters()
    replicated = 3 * 56 * reference.config.num_hidden_layers  # norms, and each KV head is on two ranks
    kv_copies = reference.config.num_hidden_layers * 2 * 56 * 2 * 8
    assert all(whole / 4 < count < (whole + kv_copies) / 4 + replicated for count in counts)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "size", "valid"),
    [
        (8, 2, 48, 3, "1, 2, 4, 8"),
        (12, 4, 48, 3, "1, 2, 4, 12"),
        (8, 2, 36, 8, "1, 2, 4"),
    ],
)
def test_a_size_that_does_not_fit_lists_those_that_do(
    heads: int, kv_heads: int, width: int, size: int, valid: str, tmp_path: Path
) -> None:
    reference = random_model(
        "llama",
        hidden_size=24,
        head_dim=8,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
    )
    config = load_model_config(save(reference, tmp_path))
    with pytest.raises(InvalidParameterError, match=f"valid sizes: {valid}$") as caught:
        make_model(config, lone_rank(0, size), torch.float32)
    assert caught.value.field == "tp"
