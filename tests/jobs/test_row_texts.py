"""What a reader makes of messages and results that come late, twice or torn."""

from __future__ import annotations

from minisgl_batch.reasoning import Reasoning
from minisgl_jobs.model import RowResult
from minisgl_jobs.row_texts import RowFinished, RowStarted, RowText, RowTexts
from minisgl_jobs.streams import RowDelta, RowEnd


def test_messages_of_a_worker_that_lost_its_chunk_are_passed_over() -> None:
    texts = RowTexts(4)
    assert texts.apply(RowDelta(0, 0, 7, 0, "new")) == [RowStarted(0, 0), RowText(0, 0, 0, "new")]
    assert texts.apply(RowDelta(0, 0, 6, 0, "old text")) == []
    assert texts.apply(RowDelta(0, 0, 7, 3, "er")) == [RowText(0, 0, 3, "er")]
    assert texts.apply(RowDelta(0, 0, 8, 0, "x")) == [RowStarted(0, 0), RowText(0, 0, 0, "x")]


def test_repeated_and_overlapping_messages_add_nothing() -> None:
    texts = RowTexts(4)
    texts.apply(RowDelta(1, 0, 7, 0, "abc"))
    assert texts.apply(RowDelta(1, 0, 7, 0, "abc")) == []
    assert texts.apply(RowDelta(1, 0, 7, 0, "abcd")) == [RowText(1, 0, 3, "d")]
    assert texts.apply(RowDelta(1, 0, 7, 2, "cde")) == [RowText(1, 0, 4, "e")]
    assert texts.apply(RowDelta(1, 0, 7, 9, "z")) is None
    end = RowEnd("ok", "stop", 5, 1, 2, 3)
    assert texts.apply(RowDelta(1, 0, 7, 5, "", end)) == [RowFinished(1, 0, "ok", "stop", 2, 3, None)]
    assert texts.apply(RowDelta(1, 0, 7, 5, "", end)) == []
    assert list(texts.finish(RowResult(1, text="abcde"))) == []
    assert texts.missing() == [range(1), range(2, 4)]


def test_marks_around_the_reasoning_are_counted_and_not_shown() -> None:
    texts = RowTexts(2)
    found = Reasoning(7, 9, 17)
    assert texts.apply(RowDelta(0, 0, 7, 0, "<think>h", reasoning=Reasoning(7, 8, 8))) == [
        RowStarted(0, 0),
        RowText(0, 0, 7, "h", True),
    ]
    assert texts.apply(RowDelta(0, 0, 7, 7, "hm</think>4", reasoning=found)) == [
        RowText(0, 0, 8, "m", True),
        RowText(0, 0, 17, "4"),
    ]
    result = RowResult(0, text="42", reasoning_text="hm", raw_text="<think>hm</think>42")
    assert next(texts.finish(result)) == RowText(0, 0, 18, "2")
    late = RowResult(1, text="42", reasoning_text="hm", raw_text="hm</think>42")
    assert list(texts.finish(late))[1:3] == [RowText(1, 0, 0, "hm", True), RowText(1, 0, 10, "42")]


def test_a_row_with_several_samples_is_missing_until_all_have_ended() -> None:
    texts = RowTexts(2)
    for sample in (2, 0):
        texts.apply(RowDelta(0, sample, 7, 0, "a", RowEnd("ok", "stop", 1, 3, 0, 1)))
    assert texts.missing(strict=True) == [range(2)]
    assert list(texts.finish(RowResult(0, sample_index=1, text="b")))[1] == RowText(0, 1, 0, "b")
    assert texts.missing(strict=True) == [range(1, 2)]
    texts.apply(RowDelta(1, 0, 7, 0, "a", RowEnd("ok", "stop", 1, 1, 0, 1)))
    assert texts.missing(strict=True) == []


def test_a_result_that_differs_from_the_streamed_text_starts_the_row_anew() -> None:
    texts = RowTexts(1)
    texts.apply(RowDelta(0, 0, 7, 0, "abc"))
    assert [type(event) for event in texts.finish(RowResult(0, text="abx"))] == [RowStarted, RowText, RowFinished]
