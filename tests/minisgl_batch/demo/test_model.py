"""The committed model and its tokenizer, through plain Hugging Face classes on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl_batch.demo.data import EXAMPLE_SYSTEM, Generator, held_out_examples
from minisgl_batch.demo.tokenizer import build_tokenizer, encode_conversation
from minisgl_batch.demo.train import accuracy_by_kind, answers
from minisgl_batch.hub import DEMO_MODEL, model_path

FOLDER = model_path(DEMO_MODEL)
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)


def token_ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text)["input_ids"]
    return ids


@pytest.mark.parametrize("text", ["눈이 내린다", "Příliš žluťoučký kůň", "👩‍👩‍👧 🙂", "a  b\n\n\tc ", "½ \x00 ﷽"])
def test_any_script_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(token_ids(text)) == text


@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(token_ids(text)) == text


def test_the_committed_vocabulary_is_what_the_script_builds() -> None:
    assert build_tokenizer(seed=1).get_vocab() == TOKENIZER.get_vocab()


def test_each_digit_is_a_token(seed: int) -> None:
    number = str(seed)
    assert TOKENIZER.convert_ids_to_tokens(token_ids(number)) == list(number)
    tokens = TOKENIZER.convert_ids_to_tokens(token_ids(f"x{number} + {number}y"))
    assert [token for token in tokens if token.isdigit()] == list(number * 2)


def test_training_sees_conversations_as_the_chat_template_renders_them(seed: int) -> None:
    generator, num_compared = Generator(seed), 0
    while num_compared < 100:
        turns = [turn._replace(spelled=False) for turn in generator.short_conversation()]
        if turns[0].role:
            ids, learned = encode_conversation(TOKENIZER.backend_tokenizer, turns)
            messages = [{"role": turn.role, "content": turn.text} for turn in turns]
            assert TOKENIZER.apply_chat_template(messages, return_dict=True)["input_ids"] == ids
            texts = TOKENIZER.decode([i for i, is_learned in zip(ids, learned, strict=True) if is_learned])
            assert texts == "".join(f"<|assistant|>{t.text}<|end|>" for t in turns if t.role == "assistant")
            num_compared += 1


def test_the_rendered_text_gives_the_same_ids_as_the_template() -> None:
    messages = [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "What is 12 + 3? "}]
    options: dict[str, Any] = {"add_generation_prompt": True}
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, **options)
    assert text == "<|system|>Be brief.<|end|><|user|>What is 12 + 3?<|end|><|assistant|>"
    assert token_ids(text) == TOKENIZER.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


@pytest.mark.parametrize("system", ["", EXAMPLE_SYSTEM])
def test_the_model_answers_held_out_prompts(seed: int, system: str) -> None:
    examples = held_out_examples(seed, num_per_kind=20)
    accuracy = accuracy_by_kind(examples, answers(FOLDER, [e.prompt for e in examples], system))
    assert accuracy.pop("all") >= 0.97, accuracy
    assert min(accuracy.values()) >= 0.9, accuracy


def test_a_plain_prompt_is_answered_without_the_template(seed: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, torch_dtype=torch.float32)
    examples = held_out_examples(seed, num_per_kind=3)
    inputs = TOKENIZER([e.prompt for e in examples], padding=True, return_tensors="pt")
    output = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    texts = TOKENIZER.batch_decode(output, skip_special_tokens=True)
    assert accuracy_by_kind(examples, texts)["all"] >= 0.9


def test_the_model_is_small_and_its_weights_are_bfloat16() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, torch_dtype="auto")
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 4e6
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000
