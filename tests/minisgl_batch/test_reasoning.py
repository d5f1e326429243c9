"""Reasoning told from answers, however the text comes in pieces."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_batch.reasoning import HARMONY, THINK, Marks, ReasoningSplitter, find_reasoning

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "<thi", "nk>", " ", "\n", "a", "b"]))


def split(pieces: list[str], *, opened: bool, marks: Marks = THINK) -> tuple[str, str, str]:
    """(raw text, reasoning, answer), put together from what each piece released."""
    splitter = ReasoningSplitter(opened=opened, marks=marks)
    raw = reasoning = answer = ""
    for released in [*map(splitter.push, pieces), ""]:
        found = splitter.found.split(released, len(raw))
        raw, reasoning, answer = raw + released, reasoning + found[0], answer + found[1]
    last = splitter.flush()
    found = splitter.found.split(last, len(raw))
    return raw + last, reasoning + found[0], answer + found[1]


def expected(text: str, *, opened: bool) -> tuple[str, str]:
    """The same of a whole text, by another way."""
    lead = re.match(r"\s*<think>\s*", text)
    if lead is None and not opened:
        return "", text
    reasoning, mark, answer = text[lead.end() if lead else 0 :].partition("</think>")
    return reasoning.strip(), answer.lstrip() if mark else ""


@given(PIECES, st.booleans(), st.lists(st.integers(0, 40), max_size=4))
def test_any_text_in_any_pieces(parts: list[str], opened: bool, cuts: list[int]) -> None:
    text = "".join(parts)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    raw, reasoning, answer = split(pieces, opened=opened)
    assert raw == text
    assert (reasoning, answer) == expected(text, opened=opened)
    assert find_reasoning(raw, reasoning, answer).split(raw) == (reasoning, answer)


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>\nhm, 4\n</think>\n\n42", False, ("hm, 4", "42")),
        ("hm, 4\n</think>\n\n42", True, ("hm, 4", "42")),
        ("<think>hm</think>42", True, ("hm", "42")),  # the model opens it once more
        ("<think>\n\n</think>\n\n42", False, ("", "42")),
        ("<think>hm", False, ("hm", "")),  # cut by max_tokens
        ("hm </thin", True, ("hm </thin", "")),
        ("42 <think>no</think>", False, ("", "42 <think>no</think>")),
        ("hm</think>42", False, ("", "hm</think>42")),
        ("<thi", False, ("", "<thi")),
        ("</think>42", True, ("", "42")),
        ("", True, ("", "")),
    ],
)
def test_what_models_write(text: str, opened: bool, parts: tuple[str, str]) -> None:
    assert split(list(text), opened=opened) == (text, *parts)
    assert split([text], opened=opened) == (text, *parts)


CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        (f"<|channel|>analysis<|message|>hm, 4{FINAL}42", False, ("hm, 4", "42")),
        (f"hm, 4 {FINAL} 42", True, ("hm, 4", "42")),
        ("<|channel|>final<|message|> 42", False, ("", "42")),
        ("<|channel|>final<|message|>", False, ("", "")),
        ("<|channel|>analysis<|message|>hm", False, ("hm", "")),
        ("<|channel|>analysis<|message|>", False, ("", "")),
        ("<|channel|>", False, ("", "")),  # a header that is cut is neither
        (" <|channel|>ana", True, ("", "")),
        ("<|channel|>analysis<|message|>hm <|end|>", False, ("hm", "")),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>f", False, ("hm", "")),
        (f"<|channel|>analysis<|message|>hm <|end|><|start|>assistant{CALL}", False, ("hm", CALL)),
        (f"hm<|end|><|start|>assistant to=f{CALL}{FINAL}42", True, ("hm", f" to=f{CALL}{FINAL}42")),
        (CALL, False, ("", CALL)),
        (f"hm<|end|><|start|>f to=assistant{CALL}{FINAL}42", True, (f"hm<|end|><|start|>f to=assistant{CALL}", "42")),
        ("hm <|en", True, ("hm <|en", "")),
        ("42", False, ("", "42")),
        (f"<|channel|>analysis<|message|>a<|end|><|start|>b{FINAL}42", False, ("a<|end|><|start|>b", "42")),
    ],
)
def test_what_gpt_oss_writes(text: str, opened: bool, parts: tuple[str, str]) -> None:
    for pieces in (list(text), [text], re.split(r"(?=<)", text)):
        assert split(pieces, opened=opened, marks=HARMONY) == (text, *parts)
    assert find_reasoning(text, *parts).split(text) == parts


CHANNEL_PIECES = [
    "<|channel|>",
    "analysis",
    "final",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "assistant",
    FINAL,
    " ",
    "a",
]


@given(st.lists(st.sampled_from(CHANNEL_PIECES)), st.booleans())
def test_any_text_of_gpt_oss(pieces: list[str], opened: bool) -> None:
    whole = split(["".join(pieces)], opened=opened, marks=HARMONY)
    assert split(pieces, opened=opened, marks=HARMONY) == whole


def test_text_is_released_as_soon_as_it_is_known() -> None:
    splitter = ReasoningSplitter(opened=True)
    pushed = ["a ", "b", " </th", "x", "</think>", " ", "42", "<"]
    assert [splitter.push(text) for text in pushed] == ["a", " b", "", " </thx", "</think>", " ", "42", "<"]
