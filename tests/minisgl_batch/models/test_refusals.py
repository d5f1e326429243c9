"""Models that can't be run: each refusal names the file, the key where there is one, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import zeros

from minisgl_batch import LLM, hub
from minisgl_batch.config import EngineConfig
from minisgl_batch.errors import ModelError
from minisgl_batch.hub import model_path, warn_of_adapter
from minisgl_batch.models.checkpoint import Checkpoint
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.families import SUPPORTED_ARCHITECTURES
from minisgl_workers.group import run_worker
from minisgl_workers.options import WorkerOptions

QWEN = {"architectures": ["Qwen3ForCausalLM"]}
BY_KEY: dict[str, tuple[dict[str, Any], str]] = {
    "AWQ": (QWEN | {"quantization_config": {"quant_method": "awq"}}, r"quantization_config: .*\(awq\).*use the one"),
    "GPTQ": (QWEN | {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config: .*\(gptq\).*bfloat16"),
    "NVFP4": (QWEN | {"quantization_config": {"quant_method": "modelopt"}}, r"quantization_config: .*\(modelopt\)"),
    "bitsandbytes": (
        QWEN | {"quantization_config": {"load_in_4bit": True}},
        r"quantization_config: .*\(bitsandbytes\)",
    ),
    "compressed": (QWEN | {"compression_config": {"quant_method": "sparseml"}}, r"compression_config: .*\(sparseml\)"),
    "MXFP4 of another model": (
        QWEN | {"quantization_config": {"quant_method": "mxfp4"}},
        r"\(mxfp4\) aren't supported",
    ),
    "gpt-oss in another quantization": (
        {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "awq"}},
        r"quantization_config: .*\(awq\)",
    ),
    "a text": (QWEN | {"quantization_config": "int4"}, r"quantization_config: .*\(int4\)"),
    "images": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 8}},
        r"vision_config: models that read images aren't supported: use one that reads text alone",
    ),
    "sound": (QWEN | {"audio_config": {"d_model": 8}}, r"audio_config: models that read sound aren't supported"),
    "T5": (
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        r"is_encoder_decoder: models with an encoder aren't supported",
    ),
    "BERT": ({"architectures": ["BertModel"]}, r"architectures: 'BertModel' isn't supported \(embedding, encoder"),
    "a classifier": (
        {"architectures": ["Qwen3ForSequenceClassification"]},
        r"architectures: 'Qwen3ForSequenceClassification' isn't supported \(embedding, encoder and classification",
    ),
    "unknown": (
        {"architectures": ["MambaForCausalLM"]},
        rf"architectures: 'MambaForCausalLM' isn't supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}$",
    ),
}


def write(folder: Path, name: str, content: Any) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("case", BY_KEY)
def test_a_key_of_the_config(case: str, tmp_path: Path) -> None:
    config, message = BY_KEY[case]
    with pytest.raises(ModelError, match=message) as caught:
        load_model_config(write(tmp_path, "config.json", config))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    """Qwen3-Embedding's config.json says nothing of it."""
    write(tmp_path, "config.json", QWEN)
    write(tmp_path, "modules.json", [])
    with pytest.raises(
        ModelError, match=r"modules\.json: embedding models .* aren't supported: use one that generates"
    ):
        load_model_config(tmp_path)


def test_a_lora_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = r"adapter_config\.json: LoRA adapters aren't supported: merge .* with peft's merge_and_unload"
    write(tmp_path, "adapter_config.json", {})
    with pytest.raises(ModelError, match=message):
        model_path(str(tmp_path))
    write(tmp_path, "config.json", QWEN)  # training tools put it there
    save_file({"lora_A": zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=message):
        Checkpoint(tmp_path)
    save_file({"norm.weight": zeros(1)}, tmp_path / "model.safetensors")  # merged, and the adapter left beside it
    assert list(Checkpoint(tmp_path).tensors) == ["norm.weight"]
    warn_of_adapter(tmp_path)
    assert caplog.messages == [
        f"{tmp_path / 'adapter_config.json'}: the adapter isn't applied, the weights beside it run as they are"
    ]
    (tmp_path / "adapter_config.json").unlink()
    warn_of_adapter(tmp_path)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model-Q4_K_M.gguf"])
def test_weights_in_another_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors files; if .* convert them to safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=rf"holds weights as {name} only: convert them to safetensors, such as by"):
        Checkpoint(tmp_path)


def test_refusals_come_before_anything_is_loaded(tmp_path: Path) -> None:
    """The folder has no tokenizer either, which would be the next to be missed."""
    folder = write(tmp_path, "config.json", BY_KEY["images"][0])
    with pytest.raises(ModelError, match="vision_config"):
        LLM(str(folder))
    options = WorkerOptions(engine=EngineConfig(model=str(folder)), redis_url="redis://127.0.0.1:1")
    with pytest.raises(ModelError, match="vision_config"):
        run_worker(options, lambda _: None)


def test_weights_of_what_is_refused_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = write(tmp_path, "config.json", BY_KEY["AWQ"][0]), []

    def download(model: str, revision: str | None, patterns: list[str]) -> Path:
        asked.append((model, revision, "*.safetensors" in patterns))
        return folder

    monkeypatch.setattr(hub, "_download", download)
    with pytest.raises(ModelError, match="quantization_config"):
        LLM("someone/model-awq")
    options = WorkerOptions(engine=EngineConfig(model="someone/model-awq"), redis_url="redis://127.0.0.1:1")
    with pytest.raises(ModelError, match="quantization_config"):
        run_worker(options, lambda _: None)
    assert set(asked) == {("someone/model-awq", None, False)}
