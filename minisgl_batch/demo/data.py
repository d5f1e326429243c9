"""The demo model's data: an endless stream of conversations, split by one rule into training and evaluation.

`is_held_out(prompt)` looks at the prompt's text alone, and `Generator` asks it for every prompt it makes: the training
stream never holds a prompt of the evaluation or of `examples/prompts.jsonl`. Everything is drawn from one
`random.Random`, so the same seed gives the same data on every machine.

Knows nothing of tokens or torch. Used by `tokenizer.py`, `train.py` and the tests; run as a program it writes
`examples/prompts.jsonl`:

    python -m minisgl_batch.demo.data > examples/prompts.jsonl
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from minisgl_batch.demo import phrasings, words
from minisgl_batch.demo.kinds import KINDS

HELD_OUT_SHARE = 16  # one prompt in so many
# Kinds that need more practice than the others, and those whose answers are learned letter by letter.
PRACTICE = {"arithmetic": 4, "sort_numbers": 2, "sort_words": 2, "count_letters": 2, "calendar": 2, "reverse_word": 2}
SPELLED_KINDS = ("reverse_word", "upper_case")

EXAMPLE_ROWS_PER_KIND = 16
EXAMPLE_SEED = 2024
EXAMPLE_SYSTEM = (
    "You are a careful assistant that labels data for a small research project. Every answer goes straight into a "
    "table, so write nothing but the answer: no greeting, no explanation and no closing remark."
)


@dataclass(frozen=True)
class Example:
    """One question and its only right answer."""

    kind: str
    prompt: str
    answer: str


class Turn(NamedTuple):
    """One message of a conversation.

    Attributes:
        role: "system", "user", "assistant", or "" for a plain prompt outside the chat template.
        text: what is said.
        spelled: the text is learned one letter a token.
    """

    role: str
    text: str
    spelled: bool = False


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept for evaluation. Case, white space and closing punctuation make no difference."""
    text = " ".join(prompt.casefold().split()).rstrip(" ?.!=:")
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


class Generator:
    """Endless examples and conversations from one seed, on one side of the split.

    Args:
        seed: the same seed gives the same stream.
        held_out: make only prompts that are held out; without it, none of them.
    """

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        self._rng = random.Random(str(seed))
        self._held_out = held_out
        self._weights = [PRACTICE.get(kind, 1) for kind in KINDS]

    def example(self, kind: str | None = None) -> Example:
        """The next example; of a random kind when none is given."""
        kind = kind or self._rng.choices(list(KINDS), self._weights)[0]
        while True:
            prompt, answer = KINDS[kind](self._rng)
            if is_held_out(prompt) == self._held_out:
                return Example(kind, prompt, answer)

    def short_conversation(self) -> list[Turn]:
        """Most of the training: one question; some with a short system message, more turns or no template."""
        system_words = self._rng.randint(2, 40) if self._rng.random() < 0.25 else 0
        num_questions = self._rng.choice([2, 3]) if self._rng.random() < 0.1 else 1
        turns = self._conversation(system_words, num_questions)
        if len(turns) == 2 and self._rng.random() < 0.06:
            # A plain prompt: the model learns to open the assistant's turn by itself.
            turns[0] = turns[0]._replace(role="")
        return turns

    def long_conversation(self, most_words: int) -> list[Turn]:
        """A long system message and one question, or a shorter one and many questions; lengths on a log scale."""
        num_words = int(most_words ** self._rng.uniform(0.5, 1.0))
        if self._rng.random() < 0.5:
            return self._conversation(num_words, num_questions=1)
        return self._conversation(self._rng.randint(0, num_words // 2), num_questions=max(1, num_words // 40))

    def system_text(self, num_words: int) -> str:
        """A system message of at least `num_words` words, meaningful or not: none of it changes an answer."""
        sentences: list[str] = []
        while sum(sentence.count(" ") + 1 for sentence in sentences) < num_words:
            sentences.append(self._system_sentence())
        return self._rng.choice([" ", " ", "\n"]).join(sentences)

    def _system_sentence(self) -> str:
        rng, draw = self._rng, self._rng.random()
        if draw < 0.5:
            return rng.choice(phrasings.SYSTEM)
        if draw < 0.6:
            example = self.example()
            return f"{example.prompt} {example.answer}"
        pools = (words.WORDS, words.NAMES, words.CITIES, rng.choice(phrasings.SYSTEM).split())
        salad = [
            words.made_up_word(rng) if rng.random() < 0.3 else rng.choice(rng.choice(pools))
            for _ in range(rng.randint(3, 12))
        ]
        return " ".join(salad).capitalize() + rng.choice([".", ".", "!", "?", ":", " 🙂"])

    def _conversation(self, system_words: int, num_questions: int) -> list[Turn]:
        turns = [Turn("system", self.system_text(system_words))] if system_words else []
        for _ in range(num_questions):
            example = self.example()
            turns.append(Turn("user", self._careless(example.prompt)))
            turns.append(Turn("assistant", example.answer, example.kind in SPELLED_KINDS))
        return turns

    def _careless(self, prompt: str) -> str:
        """Now and then a prompt as people type it: in lower case at the start, or without the closing mark."""
        draw = self._rng.random()
        if draw < 0.05:
            return prompt[0].lower() + prompt[1:]
        return prompt.rstrip("?.") if draw < 0.1 else prompt


def held_out_examples(seed: int | str, num_per_kind: int) -> list[Example]:
    """Different held-out examples, first all of one kind, then all of the next."""
    generator = Generator(seed, held_out=True)
    examples: dict[str, Example] = {}
    for number, kind in enumerate(KINDS, start=1):
        while len(examples) < number * num_per_kind:
            example = generator.example(kind)
            examples[example.prompt] = example
    return list(examples.values())


def example_rows() -> list[dict[str, Any]]:
    """The rows of `examples/prompts.jsonl`, kinds in turn; every other round stands after the same system message."""
    examples = held_out_examples(EXAMPLE_SEED, EXAMPLE_ROWS_PER_KIND)
    rows = []
    for index in range(EXAMPLE_ROWS_PER_KIND):
        for example in examples[index::EXAMPLE_ROWS_PER_KIND]:
            messages = [{"role": "system", "content": EXAMPLE_SYSTEM}] if index % 2 else []
            rows.append(
                {
                    "custom_id": f"{example.kind}-{index:02}",
                    "messages": [*messages, {"role": "user", "content": example.prompt}],
                    "metadata": {"kind": example.kind, "answer": example.answer},
                }
            )
    return rows


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in example_rows())
