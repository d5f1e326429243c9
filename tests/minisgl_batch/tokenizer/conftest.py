"""Tokenizers of every kind that models come with, built here from a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind. 12 + 34 = 46.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy; kůň a pes.",
    "다람쥐 헌 쳇바퀴에 타고파. 안녕하세요, 반갑습니다!",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈 are joined; 👍🏽 has a skin tone.",
    '{"name": "Ada", "city": "London", "age": 36}\n\n\tif x: return y',
] * 3

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=specials)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # One that the byte alphabet can spell, one that it can't, one that it half can.
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "<생각>", "Ġ x")])
    return tokenizer


def byte_level_in_sequence() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def byte_fallback(*, strip: bool) -> Tokenizer:
    """As Llama 2 and Mistral (which strip a leading space) or Gemma (which doesn't)."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in tokens]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    to_metaspace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_metaspace]) if strip else to_metaspace
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"]))
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"]))
    return tokenizer


def word_suffix() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(vocab_size=300, special_tokens=["<unk>"]))
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_in_sequence": byte_level_in_sequence,
    "byte_fallback": lambda: byte_fallback(strip=True),
    "byte_fallback_unstripped": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "word_suffix": word_suffix,
    "no_decoder": no_decoder,
}


@pytest.fixture(scope="session", params=KINDS)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Tokenizer:
    return byte_fallback(strip=True)


ModelFolder = Callable[..., Path]


@pytest.fixture
def model_folder(tmp_path: Path, byte_level_tokenizer: Tokenizer) -> ModelFolder:
    """Writes a Qwen-like model folder (without weights); keywords change its files."""

    def write(
        tokenizer: Tokenizer = byte_level_tokenizer,
        *,
        config: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        tokenizer_config: dict[str, Any] | None = None,
    ) -> Path:
        config = {
            "model_type": "qwen3",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 4096,
            **(config or {}),
        }
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **(tokenizer_config or {})}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        if generation_config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return write


@pytest.fixture
def chatml_folder(model_folder: ModelFolder) -> Path:
    return model_folder(tokenizer_config={"eos_token": "<|endoftext|>", "chat_template": CHATML})


@pytest.fixture
def strict_folder(model_folder: ModelFolder, byte_fallback_tokenizer: Tokenizer) -> Path:
    """Llama-2-like: adds BOS to texts, its template writes one itself and wants roles to alternate."""
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": STRICT_TEMPLATE}
    return model_folder(byte_fallback_tokenizer, tokenizer_config=tokenizer_config)
