"""The fourteen kinds of questions of the demo model: each function draws one prompt and its only right answer.

Knows nothing of the split into training and evaluation. Used by `data.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from minisgl_batch.demo import phrasings, words


def arithmetic(rng: random.Random) -> tuple[str, str]:
    a, b = _number(rng, 3), _number(rng, 3)
    if rng.random() < 0.5:
        forms, result = phrasings.SUM, a + b
    else:
        if a < b and rng.random() < 0.7:
            a, b = b, a
        # Nobody spends more coins than there are.
        forms, result = [*phrasings.DIFFERENCE, phrasings.SPENDING] if a >= b else phrasings.DIFFERENCE, a - b
    return rng.choice(forms).format(a=a, b=b, name=rng.choice(words.NAMES)), str(result)


def number_to_words(rng: random.Random) -> tuple[str, str]:
    number = _number(rng, 4)
    return rng.choice(phrasings.NUMBER_TO_WORDS).format(number=number), words.number_in_words(number)


def words_to_number(rng: random.Random) -> tuple[str, str]:
    number = _number(rng, 4)
    return rng.choice(phrasings.WORDS_TO_NUMBER).format(number=words.number_in_words(number)), str(number)


def sort_numbers(rng: random.Random) -> tuple[str, str]:
    numbers = _distinct(rng, rng.randint(3, 6), most_digits=3)
    descending = rng.random() < 0.5
    order = rng.choice(phrasings.DESCENDING if descending else phrasings.ASCENDING)
    prompt = rng.choice(phrasings.SORT_NUMBERS).format(order=order, items=_joined(numbers))
    return prompt, _joined(sorted(numbers, reverse=descending))


def sort_words(rng: random.Random) -> tuple[str, str]:
    items = rng.sample(words.WORDS, rng.randint(3, 6))
    return rng.choice(phrasings.SORT_WORDS).format(items=_joined(items)), _joined(sorted(items))


def count_letters(rng: random.Random) -> tuple[str, str]:
    word = words.any_word(rng)
    if rng.random() < 0.4:
        return rng.choice(phrasings.WORD_LENGTH).format(word=_quoted(rng, word)), str(len(word))
    letter = rng.choice(word if rng.random() < 0.8 else "abcdefghijklmnopqrstuvwxyz")
    prompt = rng.choice(phrasings.COUNT_LETTER).format(letter=letter, word=_quoted(rng, word))
    return prompt, str(word.count(letter))


def count_items(rng: random.Random) -> tuple[str, str]:
    count = rng.randint(2, 12)
    items = rng.sample(words.WORDS, count) if rng.random() < 0.7 else _distinct(rng, count, most_digits=3)
    return rng.choice(phrasings.COUNT_ITEMS).format(items=_joined(items)), str(count)


def calendar(rng: random.Random) -> tuple[str, str]:
    unit, names, most = rng.choice([("day", words.DAYS, 20), ("month", words.MONTHS, 12)])
    start, offset, later = rng.randrange(len(names)), rng.randint(1, most), rng.random() < 0.5
    forms = phrasings.CALENDAR + (phrasings.CALENDAR_AFTER if later else phrasings.CALENDAR_BEFORE)
    prompt = rng.choice(forms).format(
        unit=unit,
        start=names[start],
        span=f"{offset} {unit}{'s' if offset > 1 else ''}",
        side="after" if later else "before",
        name=rng.choice(words.NAMES),
    )
    return prompt, names[(start + (offset if later else -offset)) % len(names)]


def pick_largest(rng: random.Random) -> tuple[str, str]:
    numbers = _distinct(rng, rng.randint(2, 6), most_digits=4)
    largest = rng.random() < 0.6
    word = rng.choice(["largest", "biggest", "highest"] if largest else ["smallest", "lowest"])
    prompt = rng.choice(phrasings.PICK).format(word=word, items=_joined(numbers))
    return prompt, str(max(numbers) if largest else min(numbers))


def sentiment(rng: random.Random) -> tuple[str, str]:
    positive = rng.random() < 0.5
    own, opposite = (words.PRAISE, words.BLAME) if positive else (words.BLAME, words.PRAISE)
    remarks = words.PRAISE_REMARKS if positive else words.BLAME_REMARKS

    def sentence() -> str:
        if rng.random() < 0.2:
            return rng.choice(remarks)
        return rng.choice(phrasings.OPINIONS).format(
            good=rng.choice(words.GOODS),
            part=rng.choice(words.PARTS),
            other_part=rng.choice(words.PARTS),
            adjective=rng.choice(own),
            other_adjective=rng.choice(own),
            opposite=rng.choice(opposite),
            name=rng.choice(words.NAMES),
        )

    review = " ".join(sentence() for _ in range(rng.randint(1, 3)))
    return rng.choice(phrasings.SENTIMENT).format(review=review), "positive" if positive else "negative"


def extract_json(rng: random.Random) -> tuple[str, str]:
    name, city = (
        rng.choice(known) if rng.random() < 0.8 else words.made_up_word(rng).capitalize()
        for known in (words.NAMES, words.CITIES)
    )
    person = {"name": name, "city": city, "age": rng.randint(1, 99)}
    text = rng.choice(phrasings.PERSON).format(**person)
    return rng.choice(phrasings.EXTRACT).format(text=text), json.dumps(person, ensure_ascii=False)


def reverse_word(rng: random.Random) -> tuple[str, str]:
    word = words.any_word(rng)
    return rng.choice(phrasings.REVERSE).format(word=_quoted(rng, word)), word[::-1]


def upper_case(rng: random.Random) -> tuple[str, str]:
    text = " ".join(words.any_word(rng) for _ in range(rng.randint(1, 4)))
    return rng.choice(phrasings.UPPER_CASE).format(text=_quoted(rng, text)), text.upper()


def translate(rng: random.Random) -> tuple[str, str]:
    index, language = rng.choice(list(enumerate(words.LANGUAGES)))
    items = rng.sample(list(words.DICTIONARY), rng.randint(1, 3))
    prompt = rng.choice(phrasings.TRANSLATE).format(language=language, items=_joined(items))
    return prompt, _joined([words.DICTIONARY[item][index] for item in items])


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    kind.__name__: kind
    for kind in (
        arithmetic,
        number_to_words,
        words_to_number,
        sort_numbers,
        sort_words,
        count_letters,
        count_items,
        calendar,
        pick_largest,
        sentiment,
        extract_json,
        reverse_word,
        upper_case,
        translate,
    )
}


def _number(rng: random.Random, most_digits: int) -> int:
    """A number of 1 to `most_digits` digits, longer ones more often."""
    sizes = range(1, most_digits + 1)
    num_digits = rng.choices(sizes, sizes)[0]
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


def _distinct(rng: random.Random, count: int, most_digits: int) -> list[int]:
    numbers: dict[int, None] = {}
    while len(numbers) < count:
        numbers[_number(rng, most_digits)] = None
    return list(numbers)


def _joined(items: list[int] | list[str]) -> str:
    return ", ".join(map(str, items))


def _quoted(rng: random.Random, text: str) -> str:
    quote = rng.choice(["", "", "'", '"'])
    return f"{quote}{text}{quote}"
