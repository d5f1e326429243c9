from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_batch.tokenizer.stop import StopScanner


def first_stop(text: str, strings: list[str], num_skipped: int) -> tuple[int, str] | None:
    """By definition: walk over the text; the first end of a stop string counts, the longest one at that end."""
    for end in range(num_skipped + 1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            string = max(ending, key=len)
            return end - len(string), string
    return None


@settings(max_examples=300)
@given(
    text=st.text("ab", max_size=12),
    strings=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    num_skipped=st.integers(0, 6) | st.just(0),
    data=st.data(),
)
def test_pieces_do_not_matter(
    text: str, strings: list[str], include: bool, num_skipped: int, data: st.DataObject
) -> None:
    num_skipped = min(num_skipped, len(text))
    cuts = sorted({num_skipped, *data.draw(st.lists(st.integers(0, len(text)), max_size=10))})
    starts = [0, *cuts]
    pieces = [text[start:end] for start, end in zip(starts, [*cuts, len(text)], strict=True)]

    scanner = StopScanner(strings, include=include)
    released, found = "", None
    for start, piece in zip(starts, pieces, strict=True):
        if start < num_skipped:
            released += scanner.skip(piece)
            assert text.startswith(released)
            continue
        more, found = scanner.push(piece)
        released += more
        assert text.startswith(released)
        if found is not None:
            break
    else:
        released += scanner.flush()

    expected = first_stop(text, strings, num_skipped)
    if expected is None:
        assert (released, found) == (text, None)
    else:
        start, string = expected
        assert found == string
        assert released == text[: start + (len(string) if include else 0)]


def test_the_first_to_end_wins_and_of_two_the_longer() -> None:
    assert StopScanner(["abc", "b"], include=False).push("abc") == ("a", "b")
    assert StopScanner(["bc", "abc", "c"], include=False).push("-abc") == ("-", "abc")


@pytest.mark.parametrize(
    ("text", "released"),
    [("Hello\n", "Hello"), ("Hello\n#", "Hello"), ("Hello\n\n", "Hello\n"), ("Hello#", "Hello#")],
)
def test_holds_back_no_more_than_a_beginning_of_a_stop_string(text: str, released: str) -> None:
    scanner = StopScanner(["\n##"], include=False)
    assert scanner.push(text) == (released, None)
    assert scanner.flush() == text[len(released) :]
