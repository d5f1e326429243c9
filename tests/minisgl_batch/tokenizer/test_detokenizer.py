"""A stream adds up to what decoding everything at once gives, whatever the tokenizer and the ids."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minisgl_batch.tokenizer.detokenizer import REPLACEMENT, Detokenizer, make_detokenizer

SCRIPTS = [
    "다람쥐 헌 쳇바퀴에 타고파",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 👍🏽",
    "  two  spaces ,and . punctuation n't ",
    "\ufffd a real \ufffd\ufffd replacement character",
    "ไทย עברית العربية 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
]
texts = st.one_of(st.sampled_from(SCRIPTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
property_settings = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def streamed(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    stream = detokenizer.stream()
    return "".join([*map(stream.push, token_ids), stream.flush()])


def decoded(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """By Hugging Face's decoder, with a whole replacement character for each fallback byte that is part of no other."""
    if tokenizer.token_to_id("<0x0A>") is not None:
        token_ids = replaced(tokenizer, token_ids, skip_special_tokens)
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return text


def replaced(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool) -> list[int]:
    fallback = {tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    silent = special if skip_special_tokens else set()
    shown = [token for token in token_ids if tokenizer.id_to_token(token) is not None and token not in silent]
    out: list[int] = []
    for is_byte, run in groupby(shown, fallback.__contains__):
        if is_byte:
            text = bytes(fallback[token] for token in run).decode("utf-8", "surrogateescape")
            whole = "".join(REPLACEMENT if "\udc80" <= char <= "\udcff" else char for char in text)
            out += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in whole.encode()]
        else:
            out += run
    return out


def check(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    for skip in (True, False):
        detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
        want = decoded(tokenizer, token_ids, skip_special_tokens=skip)
        assert streamed(detokenizer, token_ids) == detokenizer.decode_full(token_ids) == want


@property_settings
@given(data=st.data())
def test_random_ids(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Beyond the vocabulary, too: embeddings are padded, and a random model draws such ids.
    check(any_tokenizer, data.draw(st.lists(st.integers(0, any_tokenizer.get_vocab_size() + 8), max_size=40)))


def test_every_token(any_tokenizer: Tokenizer) -> None:
    """At the start, after a text and after itself; added tokens that no byte alphabet spells included."""
    detokenizer = make_detokenizer(any_tokenizer)
    before = any_tokenizer.encode("dog").ids[-1]
    for token_id in range(any_tokenizer.get_vocab_size() + 1):
        ids = [token_id, before, token_id, token_id]
        assert streamed(detokenizer, ids) == detokenizer.decode_full(ids) == decoded(any_tokenizer, ids)


@property_settings
@given(data=st.data())
def test_random_bytes(byte_level_tokenizer: Tokenizer, byte_fallback_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Ids of single bytes, where most sequences are invalid UTF-8, with special tokens in between."""
    num_bytes = st.integers(3, 258)
    ids = data.draw(st.lists(st.one_of(num_bytes, num_bytes, st.integers(0, 2), st.integers(259, 280)), max_size=30))
    for tokenizer in (byte_level_tokenizer, byte_fallback_tokenizer):
        check(tokenizer, ids)


@property_settings
@given(data=st.data())
def test_a_text_goes_on_behind_any_prompt(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, any_tokenizer.get_vocab_size() + 8), max_size=12)
    prompt_ids, token_ids = data.draw(ids), data.draw(ids)
    for skip in (True, False):
        detokenizer = make_detokenizer(any_tokenizer, skip_special_tokens=skip).after(prompt_ids)
        assert streamed(detokenizer, token_ids) == detokenizer.decode_full(token_ids)


def test_a_prompt_and_what_follows_it_are_one_text(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode("the dog and the fox and the dog").ids
    detokenizer, whole = make_detokenizer(any_tokenizer), decoded(any_tokenizer, ids)
    for cut in range(1, len(ids)):
        text = detokenizer.after(ids[:cut]).decode_full(ids[cut:])
        if not any_tokenizer.id_to_token(ids[cut - 1]).endswith("</w>"):  # whose space depends on what follows
            assert decoded(any_tokenizer, ids[:cut]) + text == whole
        assert detokenizer.after([]).decode_full(ids[cut:]) == decoded(any_tokenizer, ids[cut:])


@property_settings
@given(text=texts, data=st.data())
def test_text_cut_anywhere(any_tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = any_tokenizer.encode(text).ids
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    detokenizer = make_detokenizer(any_tokenizer)
    assert streamed(detokenizer, ids) == detokenizer.decode_full(ids) == decoded(any_tokenizer, ids)


@pytest.mark.parametrize("text", SCRIPTS)
def test_byte_level_holds_back_half_characters_only(byte_level_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_level_tokenizer.encode(text).ids
    stream = make_detokenizer(byte_level_tokenizer).stream()
    shown = ""
    for end, token_id in enumerate(ids, 1):
        shown += stream.push(token_id)
        so_far = decoded(byte_level_tokenizer, ids[:end])
        assert text.startswith(shown)
        assert shown == so_far or (so_far.endswith(REPLACEMENT) and so_far[:-1] == shown)
    assert shown == text
    assert stream.flush() == ""


@pytest.mark.parametrize("text", ["dog 안녕 dog", "dog\n\n안녕\n", "\n다람쥐"])
def test_byte_fallback_holds_back_half_characters_only(byte_fallback_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_fallback_tokenizer.encode(text).ids
    stream = make_detokenizer(byte_fallback_tokenizer).stream()
    shown = ""
    for end, token_id in enumerate(ids, 1):
        shown += stream.push(token_id)
        assert shown == decoded(byte_fallback_tokenizer, ids[:end]).rstrip(REPLACEMENT)
    assert shown == text


def test_half_a_character_spoils_none_before_it(byte_fallback_tokenizer: Tokenizer) -> None:
    ids = byte_fallback_tokenizer.encode("dog\n안녕").ids[:-1]
    detokenizer = make_detokenizer(byte_fallback_tokenizer)
    assert streamed(detokenizer, ids) == detokenizer.decode_full(ids) == "dog\n안" + 2 * REPLACEMENT


def test_generation_that_stops_inside_a_character(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("🦖").ids[:-1]
    stream = make_detokenizer(byte_level_tokenizer).stream()
    assert "".join(map(stream.push, ids)) == ""
    assert stream.flush() == decoded(byte_level_tokenizer, ids) == REPLACEMENT


def test_streams_are_independent(byte_level_tokenizer: Tokenizer) -> None:
    detokenizer = make_detokenizer(byte_level_tokenizer)
    texts = ["안녕하세요", "kůň 🏳️‍🌈"]
    rows = [byte_level_tokenizer.encode(text).ids for text in texts]
    streams = [detokenizer.stream() for _ in rows]
    shown = ["", ""]
    for column in range(max(map(len, rows))):
        for row, ids in enumerate(rows):
            if column < len(ids):
                shown[row] += streams[row].push(ids[column])
    assert shown == texts
