"""What the ranks of a group run in the tests of models; imports no transformers, as ranks don't."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.models.base import CausalLM
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import init_dummy_weights, load_weights
from tests.minisgl_batch.models.contiguous import sequence_logits


def logits_of_checkpoint(
    tp: TPGroup, folder: Path, sequences: list[list[int]], cuts: list[int]
) -> tuple[range, list[torch.Tensor]]:
    """This rank's vocabulary range, and the gathered logits of every token."""
    model = _model(tp, folder)
    load_weights(model, folder)
    return model.vocab_range, sequence_logits(model, sequences, cuts)


def logits_of_dummy(
    tp: TPGroup, folder: Path, seed: int, sequences: list[list[int]], cuts: list[int]
) -> list[torch.Tensor]:
    model = _model(tp, folder)
    init_dummy_weights(model, seed)
    return sequence_logits(model, sequences, cuts)


def parameter_count(tp: TPGroup, folder: Path) -> int:
    return sum(p.numel() for p in _model(tp, folder).parameters())


def _model(tp: TPGroup, folder: Path) -> CausalLM:
    return make_model(load_model_config(folder), tp, torch.float32, torch.device("cpu"))
