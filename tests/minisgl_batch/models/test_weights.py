"""Checkpoints in all layouts, and faulty ones: each fault names the tensor and the file."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.errors import ModelError
from minisgl_batch.models.base import CausalLM
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import checkpoint_parts, init_dummy_weights, load_weights, tied_as_stored
from tests.minisgl_batch.models.hf import random_model, save

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"


@pytest.fixture(params=["untied", "tied", "experts", "experts, other names"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint with everything that can be there: biases, norms of queries and keys; experts, also a shared one."""
    if "experts" in request.param:
        family = "mixtral" if "other names" in request.param else "qwen2_moe"
        reference = random_model(family, tie_word_embeddings=False)
    else:
        reference = random_model("qwen3", attention_bias=True, tie_word_embeddings=request.param == "tied")
    return save(reference, tmp_path / "model")


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return make_model(load_model_config(folder), SINGLE, dtype, torch.device("cpu"))


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    """A loaded model's parameters under the names they have in checkpoints."""
    model = empty_model(folder, dtype)
    parts = checkpoint_parts(model)  # views that see what is loaded
    load_weights(model, folder)
    return {name: part.target for name, part in parts.items()}


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def split(folder: Path, num_files: int) -> dict[str, str]:
    """Spread the tensors over several files; returns which is where."""
    tensors = load_file(folder / WEIGHTS)
    where = {key: f"model-{i % num_files}.safetensors" for i, key in enumerate(tensors)}
    for name in set(where.values()):
        save_file({key: tensor for key, tensor in tensors.items() if where[key] == name}, folder / name)
    (folder / WEIGHTS).unlink()
    return where


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_loads_the_same(folder: Path, want: Tensors) -> None:
    got = loaded(folder)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_parameters_hold_the_checkpoint(folder: Path) -> None:
    stored = {key.removeprefix("model."): tensor for key, tensor in load_file(folder / WEIGHTS).items()}
    assert_loads_the_same(folder, stored)


def test_every_parameter_is_filled_exactly_once(folder: Path) -> None:
    model = empty_model(folder)
    for parameter in model.parameters():
        parameter.zero_()
    for part in checkpoint_parts(model).values():
        part.target.add_(1.0)
    assert all((parameter == 1.0).all() for parameter in model.parameters())


def test_values_are_cast_to_the_model(folder: Path) -> None:
    whole = loaded(folder)
    for name, tensor in loaded(folder, torch.bfloat16).items():
        assert torch.equal(tensor, whole[name].bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_checkpoints_of_each_type(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save(random_model("llama", tie_word_embeddings=False).to(dtype), tmp_path / "model")
    stored = load_file(folder / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    assert load_model_config(folder).dtype == str(dtype).removeprefix("torch.")
    assert_loads_the_same(folder, {key.removeprefix("model."): tensor.float() for key, tensor in stored.items()})


def test_files_that_are_not_needed_are_left_alone(folder: Path) -> None:
    want = loaded(folder)
    names = (
        "README.md",
        "pytorch_model.bin",
        "optimizer.pt",
        "model.gguf",
        "training_args.bin",
        "model.safetensors.tmp",
    )
    for name in names:
        (folder / name).write_bytes(b"junk")
    assert_loads_the_same(folder, want)


@pytest.mark.parametrize("indexed", [True, False])
def test_several_files(folder: Path, indexed: bool) -> None:
    want = loaded(folder)
    where = split(folder, 3)
    if indexed:
        write_index(folder, where)
        save_file({"other": torch.zeros(1)}, folder / "not-in-the-index.safetensors")
    else:
        save_file({"other": torch.zeros(1)}, folder / "consolidated-00001.safetensors")
    assert_loads_the_same(folder, want)


def test_base_models_lack_the_prefix(folder: Path) -> None:
    want = loaded(folder)
    tensors = load_file(folder / WEIGHTS)
    save_file({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, folder / WEIGHTS)
    assert_loads_the_same(folder, want)


def test_buffers_of_old_releases_are_ignored(folder: Path) -> None:
    want = loaded(folder)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert_loads_the_same(folder, want)


def test_tied_weights_under_either_name_or_both(tmp_path: Path) -> None:
    folder = save(random_model("llama", tie_word_embeddings=True), tmp_path)
    want, embedding = loaded(folder), load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(folder, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    assert_loads_the_same(folder, want)
    rewrite(folder, lambda t: t.pop("model.embed_tokens.weight"))
    assert_loads_the_same(folder, want)


def test_a_head_that_differs_is_used_though_the_config_ties_it(tmp_path: Path) -> None:
    folder = save(random_model("llama", tie_word_embeddings=True), tmp_path)
    tied = load_model_config(folder)
    assert tied_as_stored(tied, folder, torch.float32) == tied
    key = "model.embed_tokens.weight"
    column = random.randrange(tied.hidden_size)
    rewrite(folder, lambda t: t[key][-1, column].fill_(1.0))
    head = load_file(folder / WEIGHTS)[key].clone()
    rewrite(folder, lambda t: t.update({"lm_head.weight": head}))
    assert tied_as_stored(tied, folder, torch.float32) == tied
    head[-1, column] += 1e-6
    rewrite(folder, lambda t: t.update({"lm_head.weight": head}))
    assert tied_as_stored(tied, folder, torch.float16) == tied
    untied = tied_as_stored(tied, folder, torch.float32)
    assert untied == replace(tied, tie_word_embeddings=False)
    model = make_model(untied, SINGLE, torch.float32, torch.device("cpu"))
    parts = checkpoint_parts(model)
    load_weights(model, folder)
    assert torch.equal(parts["lm_head.weight"].target, head)
    assert torch.equal(parts["embed_tokens.weight"].target, load_file(folder / WEIGHTS)[key])


KEY = "model.layers.1.self_attn.k_proj.weight"
TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(KEY), r"lacks layers\.1\.self_attn\.k_proj\.weight"),
    "unknown": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(1)}),
        r"model\.safetensors holds model\.layers\.0\.mlp\.up_proj\.bias, which \w+ForCausalLM",
    ),
    "another shape": (
        lambda t: t.update({KEY: torch.zeros(3, 5)}),
        r"model\.safetensors: model\.layers\.1\.\S+k_proj\.weight has the shape \[3, 5\].*asks for \[\d+, \d+\]",
    ),
    "transposed norm": (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].unsqueeze(0)}),
        r"model\.norm\.weight has the shape \[1, \d+\].*asks for \[\d+\]",
    ),
    "quantized": (lambda t: t.update({KEY: t[KEY].to(torch.int8)}), r"k_proj\.weight is stored as I8; quantized"),
    "twice": (
        lambda t: t.update({KEY.removeprefix("model."): t[KEY].clone()}),
        r"holds \S+k_proj\.weight, but \S+ holds \S+ already",
    ),
    "no layer": (
        lambda t: [t.pop(key) for key in list(t) if "layers.0" in key],
        r"lacks (layers\.0\.\S+, ){4}layers\.0\.\S+ and \d+ more tensors",
    ),
}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_tensor_with_a_number_that_is_none_is_named(number: float, folder: Path) -> None:
    """One of all numbers of the checkpoint; of 1-D norms and of experts, whose targets have gaps, as well."""
    key = random.choice([key for key in load_file(folder / WEIGHTS) if not key.startswith("lm_head")])  # may be tied

    def damage(tensors: Tensors) -> None:
        flat = tensors[key].view(-1)
        flat[random.randrange(len(flat))] = number

    rewrite(folder, damage)
    with pytest.raises(ModelError, match=rf"{WEIGHTS}: {re.escape(key)} holds NaN or infinite numbers, as float32: "):
        loaded(folder)


def test_numbers_beyond_the_dtype_are_named(folder: Path) -> None:
    key = "model.norm.weight"
    rewrite(folder, lambda t: t[key][-1:].fill_(70_000.0))
    with pytest.raises(ModelError, match=rf"{re.escape(key)} holds NaN or infinite numbers, as float16: "):
        loaded(folder, torch.float16)
    loaded(folder, torch.bfloat16)


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_faulty_tensor_is_named(fault: str, folder: Path) -> None:
    change, message = TENSOR_FAULTS[fault]
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        loaded(folder)


def test_merged_layers_of_another_size_are_named(tmp_path: Path) -> None:
    folder, key = save(random_model("phi3"), tmp_path), "model.layers.1.mlp.gate_up_proj.weight"
    num_rows, width = load_file(folder / WEIGHTS)[key].shape
    rewrite(folder, lambda t: t.update({key: torch.zeros(num_rows + 1, width)}))
    message = rf"{re.escape(key)} has the shape \[{num_rows + 1}, {width}\].*asks for \[{num_rows}, {width}\]"
    with pytest.raises(ModelError, match=message):
        loaded(folder)


def test_layers_both_merged_and_apart_are_named(tmp_path: Path) -> None:
    folder = save(random_model("phi3"), tmp_path)
    key = "model.layers.0.self_attn.v_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({key: torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=rf"qkv_proj\.weight, but .* holds {re.escape(key)}: both are layers"):
        loaded(folder)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    folder = save(random_model("llama", tie_word_embeddings=False), tmp_path)
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        loaded(folder)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    with pytest.raises(ModelError, match=r"can't read .*model\.safetensors, it is broken or incomplete"):
        loaded(folder)


def test_an_index_that_lies_is_named(folder: Path) -> None:
    where = split(folder, 2)
    key, file = next(iter(where.items()))
    other = next(name for name in where.values() if name != file)
    write_index(folder, where | {key: other})
    with pytest.raises(ModelError, match=rf"index\.json says that {other} holds {key}, but it doesn't"):
        loaded(folder)
    write_index(folder, where | {key: "model-9.safetensors"})
    with pytest.raises(ModelError, match=rf"model-9\.safetensors is missing; .*index\.json says that it holds {key}"):
        loaded(folder)
    write_index(folder, where | {key: "a" * 5000})
    with pytest.raises(ModelError, match=r"can't read .*index\.json"):
        loaded(folder)
    write_index(folder, None)
    with pytest.raises(ModelError, match=r"can't read .*index\.json.*weight_map"):
        loaded(folder)


def test_old_formats_and_empty_folders_say_what_to_do(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin only: convert them to safetensors"):
        loaded(folder)
    (folder / "pytorch_model.bin").unlink()
    os.mkfifo(folder / WEIGHTS)  # to open it would be to wait for ever
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors files"):
        loaded(folder)


def test_a_git_lfs_pointer_says_what_to_do(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=rf"{WEIGHTS} is a git-lfs pointer, .* run `git lfs pull` in "):
        loaded(folder)


def test_dummy_weights_are_normal_and_norms_are_one(folder: Path, seed: int) -> None:
    model = empty_model(folder)
    parts = checkpoint_parts(model)
    init_dummy_weights(model, seed)
    values = torch.cat([part.target.flatten() for name, part in parts.items() if not name.endswith("norm.weight")])
    assert abs(values.mean()) < 0.001
    assert abs(values.std() - 0.02) < 0.001
    assert all((part.target == 1.0).all() for name, part in parts.items() if name.endswith("norm.weight"))
