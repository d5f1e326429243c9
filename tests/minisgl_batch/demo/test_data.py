from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from minisgl_batch.demo import words
from minisgl_batch.demo.data import Generator, example_rows, held_out_examples, is_held_out
from minisgl_batch.demo.kinds import KINDS

EXAMPLES = Path(__file__).parents[3] / "examples" / "prompts.jsonl"


def test_the_same_seed_gives_the_same_stream_and_another_seed_another() -> None:
    streams = []
    for seed in (5, 5, 6):
        generator = Generator(seed)
        streams.append([generator.short_conversation() for _ in range(50)] + [generator.long_conversation(300)])
    assert streams[0] == streams[1]
    assert streams[0] != streams[2]


def test_training_never_sees_a_held_out_prompt(seed: int) -> None:
    training, evaluation = Generator(seed), Generator(seed, held_out=True)
    asked = [turn.text for _ in range(2000) for turn in training.short_conversation() if turn.role in ("user", "")]
    asked += [turn.text for _ in range(20) for turn in training.long_conversation(500) if turn.role == "user"]
    assert not any(is_held_out(prompt) for prompt in asked)
    assert all(is_held_out(evaluation.example().prompt) for _ in range(500))


def test_a_change_of_case_or_closing_mark_does_not_move_a_prompt_across_the_split(seed: int) -> None:
    for example in held_out_examples(seed, 5):
        prompt = example.prompt
        assert is_held_out(prompt[0].lower() + prompt[1:])
        assert is_held_out(f"  {prompt.rstrip('?.')}\n")


def test_about_one_prompt_in_sixteen_is_held_out_in_every_kind(seed: int) -> None:
    rng = random.Random(seed)
    for kind in KINDS.values():
        prompts = {kind(rng)[0] for _ in range(3000)}
        share = sum(map(is_held_out, prompts)) / len(prompts)
        assert 0.03 < share < 0.12, kind.__name__


def test_a_prompt_has_one_answer(seed: int) -> None:
    rng = random.Random(seed)
    answers: dict[str, str] = {}
    for kind in KINDS.values():
        for _ in range(2000):
            prompt, answer = kind(rng)
            assert answers.setdefault(prompt, answer) == answer


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (417, "four hundred seventeen"),
        (5000, "five thousand"),
        (9021, "nine thousand twenty-one"),
        (2345, "two thousand three hundred forty-five"),
    ],
)
def test_number_in_words(number: int, text: str) -> None:
    assert words.number_in_words(number) == text


def test_the_example_prompts_are_the_generator_s_and_held_out() -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    assert rows == example_rows()
    assert len(rows) >= 200
    assert len({row["custom_id"] for row in rows}) == len(rows)
    assert {row["metadata"]["kind"] for row in rows} == set(KINDS)
    assert all(is_held_out(row["messages"][-1]["content"]) for row in rows)
