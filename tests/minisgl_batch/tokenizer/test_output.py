from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minisgl_batch.messages import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    NOT_FINISHED,
    EngineStats,
    RequestsRefused,
    StepOutput,
)
from minisgl_batch.reasoning import HARMONY
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams
from minisgl_batch.tokenizer import ModelTokenizer, resolve_request
from minisgl_batch.tokenizer.detokenizer import Detokenizer, make_detokenizer
from minisgl_batch.tokenizer.input import ReasoningRules, StopRules
from minisgl_batch.tokenizer.output import OutputEvents, OutputProcessor, SampleOutput
from tests.minisgl_batch.tokenizer.conftest import ModelFolder

EOS = 2
property_settings = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def step(*rows: tuple[int, int, int], first: dict[int, int] | None = None) -> StepOutput:
    """The message for rows of (uid, token, finish)."""
    uids, tokens, finish = zip(*rows, strict=True)
    first = first or {}
    return StepOutput(
        uids=np.array(uids, dtype="<i8").tobytes(),
        tokens=np.array(tokens, dtype="<i4").tobytes(),
        finish=bytes(finish),
        first_uids=list(first),
        first_cached=list(first.values()),
        stats=EngineStats(),
    )


class Row:
    """One request: what a reader was shown, what came out."""

    def __init__(
        self,
        processor: OutputProcessor,
        stops: StopRules | None = None,
        uid: int = 7,
        reasoning: ReasoningRules | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self.processor, self.uid = processor, uid
        self.shown = ""
        self.aborts: list[int] = []
        self.result: SampleOutput | None = None
        stops = stops or StopRules()
        processor.add(uid, prompt_tokens=3, stops=stops, reasoning=reasoning, detokenizer=detokenizer)

    def watch(self) -> None:
        snapshot = self.processor.watch(self.uid)
        assert snapshot is not None
        self.shown = snapshot

    def take(self, events: OutputEvents) -> None:
        for delta in events.deltas:
            assert (delta.uid, delta.offset) == (self.uid, len(self.shown))
            self.shown += delta.text
        self.aborts += events.aborts
        if events.finished:
            (self.result,) = events.finished

    def feed(self, token_ids: list[int], last: int = NOT_FINISHED) -> None:
        """Tokens, one step each; the last of them with this `finish`."""
        for position, token_id in enumerate(token_ids, 1):
            finish = last if position == len(token_ids) else NOT_FINISHED
            self.take(self.processor.process(step((self.uid, token_id, finish)), now_s=0.0))

    def end(self) -> SampleOutput:
        assert self.result is not None
        return self.result


@pytest.fixture
def tokenizer(byte_level_tokenizer: Tokenizer) -> Tokenizer:
    return byte_level_tokenizer


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(make_detokenizer(tokenizer))


@property_settings
@given(data=st.data())
def test_every_way_of_making_the_text_agrees(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """With and without stop strings, with a reader from any token on, whatever the tokens."""
    detokenizer = make_detokenizer(any_tokenizer)
    text_ids = any_tokenizer.encode(data.draw(st.sampled_from(["the dog and the fox 12", "kůň 안녕 🏳️‍🌈 dog"]))).ids
    random_ids = st.lists(st.integers(0, any_tokenizer.get_vocab_size() - 1), max_size=12)
    ids = data.draw(random_ids) + text_ids + data.draw(random_ids)
    plain = detokenizer.decode_full(ids)
    words = st.text(st.sampled_from(sorted(set(plain)) or ["x"]), min_size=1, max_size=3)
    strings = tuple(data.draw(st.lists(words, max_size=2)))
    watch_at = data.draw(st.integers(0, len(ids)))
    include = data.draw(st.booleans())
    ends = {s: plain.index(s) + len(s) for s in strings if s in plain}
    first_end = min(ends.values(), default=None)
    # Of strings that end together the longest counts.
    kept = 0 if include else max((len(s) for s, end in ends.items() if end == first_end), default=0)
    text_end = None if first_end is None else first_end - kept

    row = Row(OutputProcessor(detokenizer), StopRules(strings=strings, include_in_output=include))
    for position, token_id in enumerate(ids):
        if position == watch_at and row.result is None:
            row.watch()
        row.feed([token_id], FINISH_LENGTH if position == len(ids) - 1 else NOT_FINISHED)
        assert plain[:text_end].startswith(row.shown)  # never more, and nothing of a stop string

    result = row.end()
    assert result.text == plain[:text_end]
    assert result.finish_reason == ("length" if text_end is None else "stop")
    assert (result.stop_reason in strings) == (text_end is not None)
    assert result.token_ids == ids[: len(result.token_ids)]
    assert row.aborts == ([] if len(result.token_ids) == len(ids) else [row.uid])
    if watch_at < len(result.token_ids):
        assert row.shown == result.text


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens(processor: OutputProcessor, tokenizer: Tokenizer, include: bool) -> None:
    newline = tokenizer.token_to_id("Ċ")
    ids = [*tokenizer.encode("Answer: 46").ids, newline, newline, *tokenizer.encode("Question").ids]
    row = Row(processor, StopRules(strings=("\n\n",), include_in_output=include))
    row.watch()
    row.feed(ids)
    result = row.end()
    assert result.text == row.shown == "Answer: 46" + ("\n\n" if include else "")
    assert (result.finish_reason, result.stop_reason) == ("stop", "\n\n")
    # The token that completed it is the last one; those that the engine made meanwhile are not the row's.
    assert result.token_ids == ids[: ids.index(newline) + 2]
    assert row.aborts == [row.uid]
    assert len(processor) == 0


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a "), (4, "a "), (5, "a dog "), (9, "a dog dog")])
def test_stop_strings_wait_for_min_tokens(
    processor: OutputProcessor, tokenizer: Tokenizer, min_tokens: int, text: str
) -> None:
    ids = [tokenizer.token_to_id(character) for character in "aĠdogĠdog"]
    row = Row(processor, StopRules(strings=("dog",), min_tokens=min_tokens))
    if random.random() < 0.5:
        row.watch()
    row.feed(ids, FINISH_LENGTH)
    assert row.end().text == text
    assert row.end().finish_reason == ("length" if min_tokens == 9 else "stop")


@pytest.mark.parametrize("watched", [False, True])
def test_a_row_ends_at_its_first_token_behind_its_time(
    processor: OutputProcessor, tokenizer: Tokenizer, watched: bool
) -> None:
    ids = tokenizer.encode("a dog and a cat").ids
    row = Row(processor, StopRules(timeout_s=5.0))
    if watched:
        row.watch()
    for now_s, token in zip((100.0, 102.0, 104.99, 105.0), ids, strict=False):
        assert row.result is None
        first = {row.uid: 0} if now_s == 100.0 else {}
        row.take(processor.process(step((row.uid, token, NOT_FINISHED), first=first), now_s))
    assert (row.end().finish_reason, row.end().stop_reason, row.aborts) == ("timeout", None, [row.uid])
    assert row.end().text == tokenizer.decode(ids[:4])
    assert row.end().token_ids == ids[:4]


def test_what_the_engine_says_goes_before_time(processor: OutputProcessor) -> None:
    row = Row(processor, StopRules(timeout_s=5.0))
    row.take(processor.process(step((row.uid, 40, NOT_FINISHED), first={row.uid: 0}), 0.0))
    row.take(processor.process(step((row.uid, 41, FINISH_LENGTH)), 9.0))
    assert (row.end().finish_reason, row.aborts) == ("length", [])


@pytest.mark.parametrize("size", [1, 3, 8, 9])
def test_a_piece_that_repeats_ends_the_row(processor: OutputProcessor, size: int) -> None:
    """The guard looks at 32 tokens, every 4 tokens, for pieces of up to 8."""
    begin, piece = random.sample(range(10, 60), 6), random.sample(range(60, 100), size)
    row = Row(processor, StopRules(repetition_guard=32))
    ids = begin + piece * (100 // size)
    row.feed(ids, FINISH_LENGTH)
    result = row.end()
    if size == 9:
        assert (result.finish_reason, result.token_ids) == ("length", ids)
        return
    assert (result.finish_reason, row.aborts) == ("repetition", [row.uid])
    assert result.token_ids == ids[:40]  # the first multiple of 4 that is at least 6 + 32


@given(st.lists(st.integers(0, 2), min_size=16, max_size=60))
def test_repetition_is_what_it_says(ids: list[int]) -> None:
    guard = 16
    processor = OutputProcessor(cast(Any, SimpleNamespace(decode_full=str)))
    row = Row(processor, StopRules(repetition_guard=guard))
    row.feed(ids, FINISH_LENGTH)

    def repeats(end: int) -> bool:
        tail = ids[end - guard : end]
        return any(all(tail[i] == tail[i % size] for i in range(guard)) for size in range(1, guard // 4 + 1))

    # The last token's end is the engine's own.
    end = next((end for end in range(guard, len(ids), guard // 8) if repeats(end)), None)
    assert row.end().finish_reason == ("length" if end is None else "repetition")
    assert row.end().token_ids == ids[:end]


@pytest.mark.parametrize(
    ("stop", "stops", "opened", "parts"),
    [
        ((), False, False, ("a dog", "a dog a")),
        (("dog",), False, False, ("a dog", "a ")),
        (("dog",), True, False, ("a", "")),
        (("dog a",), False, False, ("a dog", "a ")),
        (("dog",), False, True, ("a dog", "a ")),
        (("dog",), True, True, ("a", "")),
        (("k> a d",), True, False, ("a dog\n</thin", "")),  # across the mark
        (("k> a d",), False, False, ("a dog", "a dog a")),
    ],
)
@pytest.mark.parametrize("watched", [False, True])
def test_reasoning_is_split_off_and_searched_only_when_asked(
    processor: OutputProcessor,
    tokenizer: Tokenizer,
    stop: tuple[str, ...],
    stops: bool,
    opened: bool,
    parts: tuple[str, str],
    watched: bool,
) -> None:
    text = ("" if opened else "<think>\n") + "a dog\n</think> a dog a"
    rules = ReasoningRules(opened=opened, stops=stops)
    row = Row(processor, StopRules(strings=stop), reasoning=rules)
    if watched:
        row.watch()
    row.feed(tokenizer.encode(text).ids, FINISH_LENGTH)
    result = row.end()
    assert (result.reasoning_text, result.text) == parts
    assert result.raw_text is not None
    assert text.startswith(result.raw_text)
    assert result.raw_text.endswith(result.text)
    assert not watched or row.shown == result.raw_text


@pytest.mark.parametrize("watched", [False, True])
def test_channels_of_gpt_oss_are_told_apart_though_their_marks_have_no_text(
    model_folder: ModelFolder, tokenizer: Tokenizer, watched: bool
) -> None:
    with_channels = Tokenizer.from_str(tokenizer.to_str())
    with_channels.add_special_tokens(sorted(HARMONY.tokens))
    template = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
    folder = model_folder(with_channels, tokenizer_config={"eos_token": "<|endoftext|>", "chat_template": template})
    model_tokenizer = ModelTokenizer.load(folder)
    assert model_tokenizer.eos_ids == (0,)  # a message's end isn't the text's
    text = f"{HARMONY.opening}the dog{HARMONY.closing}a dog"
    ids = with_channels.encode(text).ids
    prompt = np.array(with_channels.encode("<|start|>assistant").ids, dtype=np.int32)
    found = {}
    for split in (False, True):
        params = SamplingParams(split_reasoning=split)
        resolved = resolve_request(model_tokenizer, prompt, params, max_len=99, job_seed=0, row_index=0)
        processor = OutputProcessor(model_tokenizer.detokenizer)
        row = Row(processor, reasoning=resolved.reasoning, detokenizer=resolved.detokenizer)
        if watched:
            row.watch()
        row.feed(ids, FINISH_LENGTH)
        result = row.end()
        found[split] = (result.raw_text, result.reasoning_text, result.text)
    assert found[True] == (text, "the dog", "a dog")
    assert found[False] == (None, None, with_channels.decode(ids))
    params = SamplingParams(split_reasoning=True, structured_outputs=StructuredOutputsParams(choice=["a"]))
    resolved = resolve_request(model_tokenizer, prompt, params, max_len=99, job_seed=0, row_index=0)
    assert resolved.reasoning is not None
    assert resolved.reasoning.marks == HARMONY._replace(has_calls=False)  # a call isn't what is asked for


@pytest.mark.parametrize("watched", [False, True])
def test_a_text_that_may_call_tools_keeps_special_tokens(
    model_folder: ModelFolder, tokenizer: Tokenizer, watched: bool
) -> None:
    """As Mistral's models write them; what ends the text is no part of it."""
    calling = Tokenizer.from_str(tokenizer.to_str())
    calling.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    model_tokenizer = ModelTokenizer.load(model_folder(calling))
    prompt, text = model_tokenizer.encode_prompt("the dog"), '[TOOL_CALLS]bark[ARGS]{"a": 1}'
    found = []
    for tools in (({"name": "bark"},), ()):
        params = SamplingParams(tools=tools)
        resolved = resolve_request(model_tokenizer, prompt, params, max_len=99, job_seed=0, row_index=0)
        row = Row(OutputProcessor(model_tokenizer.detokenizer), detokenizer=resolved.detokenizer)
        if watched:
            row.watch()
        row.feed([*calling.encode(text).ids, EOS], FINISH_STOP)
        assert not watched or row.shown == row.end().text
        found.append(row.end().text)
    assert found == [text, 'bark{"a": 1}']


def test_text_that_may_begin_a_stop_string_is_shown_late(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    newline = tokenizer.token_to_id("Ċ")
    row = Row(processor, StopRules(strings=("\n\n",)))
    row.watch()
    row.feed([*tokenizer.encode("a").ids, newline])
    assert row.shown == "a"
    row.feed(tokenizer.encode("b").ids)
    assert row.shown == "a\nb"
    row.feed([newline], FINISH_LENGTH)
    assert row.shown == row.end().text == "a\nb\n"
    assert row.end().finish_reason == "length"
    assert row.aborts == []


@pytest.mark.parametrize("finish", [FINISH_STOP, FINISH_LENGTH])
def test_stop_string_beats_an_end_that_comes_later(
    processor: OutputProcessor, tokenizer: Tokenizer, finish: int
) -> None:
    ids = tokenizer.encode("the dog").ids
    row = Row(processor, StopRules(strings=("dog",)))
    row.feed(ids)
    row.take(processor.process(step((row.uid, EOS, finish)), now_s=0.0))
    result = row.end()
    assert (result.text, result.finish_reason, result.stop_reason) == ("the ", "stop", "dog")
    assert result.token_ids == ids
    assert row.aborts == [row.uid]


def test_stop_string_and_length_in_one_token(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    row = Row(processor, StopRules(strings=("dog",)))
    row.feed(tokenizer.encode("the dog").ids, FINISH_LENGTH)
    assert (row.end().finish_reason, row.end().stop_reason) == ("stop", "dog")
    assert row.aborts == []  # the engine has ended it itself


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_token_counts_but_is_no_text(
    processor: OutputProcessor, tokenizer: Tokenizer, watched: bool, include: bool
) -> None:
    (stop_token,) = tokenizer.encode(" dog").ids
    ids = [*tokenizer.encode("the").ids, stop_token]
    row = Row(processor, StopRules(token_ids=frozenset({stop_token}), include_in_output=include))
    if watched:
        row.watch()
    row.feed(ids, FINISH_STOP)
    result = row.end()
    assert result.text == ("the dog" if include else "the")
    assert (result.finish_reason, result.stop_reason, result.token_ids) == ("stop", stop_token, ids)


@pytest.mark.parametrize("watched", [False, True])
def test_eos_counts_but_is_no_text_even_if_it_is_no_special_token(
    processor: OutputProcessor, tokenizer: Tokenizer, watched: bool
) -> None:
    ids = tokenizer.encode("the dog").ids
    row = Row(processor, StopRules(include_in_output=True))
    if watched:
        row.watch()
    row.feed(ids, FINISH_STOP)
    result = row.end()
    assert result.text == tokenizer.decode(ids[:-1])
    assert (result.finish_reason, result.stop_reason, result.token_ids) == ("stop", None, ids)


def test_ignored_eos_is_kept(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("dog").ids, EOS, *tokenizer.encode("dog").ids, EOS]
    row = Row(processor)
    row.feed(ids, FINISH_LENGTH)
    assert (row.end().text, row.end().token_ids) == ("dogdog", ids)


@pytest.mark.parametrize("watched", [False, True])
def test_abort_ends_at_once_with_what_is_there(processor: OutputProcessor, tokenizer: Tokenizer, watched: bool) -> None:
    eight = tokenizer.encode("the dog 안").ids
    row = Row(processor)
    if watched:
        row.watch()
    row.feed(eight[:-1])
    row.take(processor.abort([row.uid, 999]))
    assert row.end().text == tokenizer.decode(eight[:-1])
    assert row.end().finish_reason == "abort"
    assert row.aborts == [row.uid]
    if watched:
        assert row.shown == row.end().text
    late = processor.process(step((row.uid, eight[-1], FINISH_ABORT)), now_s=0.0)
    assert late == OutputEvents()


def test_the_engine_aborts_a_request(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    row = Row(processor)
    row.feed(tokenizer.encode("dog").ids)
    row.feed([-1], FINISH_ABORT)
    assert (row.end().text, row.end().finish_reason, row.aborts) == ("dog", "abort", [])


def test_refused_request_is_an_error(processor: OutputProcessor) -> None:
    row = Row(processor)
    row.take(processor.refuse(RequestsRefused([(row.uid, "larger than the KV pool"), (999, "unknown")])))
    result = row.end()
    assert (result.finish_reason, result.token_ids, row.aborts) == ("error", [], [])
    assert result.error is not None
    assert result.error.error_type == "request_refused"
    assert "larger than the KV pool" in str(result.error)


def test_first_token_time_and_cached_tokens_are_those_of_the_first_announcement(processor: OutputProcessor) -> None:
    row = Row(processor)
    processor.process(step((row.uid, 60, NOT_FINISHED), first={row.uid: 2, 999: 5}), now_s=1.5)
    # After a retraction the engine computes the prompt again.
    row.take(processor.process(step((row.uid, 61, FINISH_LENGTH), first={row.uid: 16}), now_s=9.0))
    assert (row.end().cached_tokens, row.end().first_token_s, row.end().prompt_tokens) == (2, 1.5, 3)


def test_reader_comes_and_goes(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    row = Row(processor)
    row.feed(tokenizer.encode("the").ids)
    assert row.shown == ""
    row.watch()
    assert row.shown == "the"
    row.feed(tokenizer.encode(" dog").ids)
    assert row.shown == "the dog"
    processor.unwatch(row.uid)
    row.feed(tokenizer.encode(" and").ids)
    assert row.shown == "the dog"
    row.watch()
    row.feed(tokenizer.encode(" fox").ids, FINISH_LENGTH)
    assert row.shown == row.end().text == "the dog and fox"
    assert processor.watch(row.uid) is None


def test_rows_of_one_step_do_not_mix(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    words = [tokenizer.encode(word).ids for word in ("the dog", "quick", "안녕하세요")]
    rows = [Row(processor, uid=uid) for uid in range(len(words))]
    finished: dict[int, SampleOutput] = {}
    for column in range(max(map(len, words))):
        here = [
            (row.uid, ids[column], FINISH_LENGTH if column == len(ids) - 1 else NOT_FINISHED)
            for row, ids in zip(rows, words, strict=True)
            if column < len(ids)
        ]
        finished |= {result.uid: result for result in processor.process(step(*here), now_s=0.0).finished}
    assert [finished[row.uid].text for row in rows] == ["the dog", "quick", "안녕하세요"]
    assert len(processor) == 0
