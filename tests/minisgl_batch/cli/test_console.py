"""How the command line talks: amounts in words, harmless lines, tables that cut nothing."""

from __future__ import annotations

import sys

import pytest

from minisgl_batch.cli.console import print_fields, print_table, show_faults
from minisgl_batch.errors import Fault
from minisgl_batch.words import count, duration, one_line, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7502, "2 h 5 min"),
        (86400 * 3 + 4 * 3600 + 59, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (12_345, "12 KiB"),
        (1023 * 1024, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (5 << 50, "5,242,880 GiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_counts() -> None:
    assert [count(n, "row") for n in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]


def test_lines_are_harmless() -> None:
    assert one_line("a\nb\tc\x1b[31m\u202e") == "a\\nb\\tc\\x1b[31m\\u202e"
    assert one_line("žluť 안녕 👩‍💻 [bold]") == "žluť 안녕 👩‍💻 [bold]"
    assert one_line("abcdef", 6) == "abcdef"
    assert one_line("abcdefg", 6) == "abcde…"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_tables_cut_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    long = "x" * 200
    print_table(("JOB", "STATE"), [(long, "[red]ok"), ("b", "")])
    print_fields([("job", long), ("empty", ""), ("state", "ok")])
    assert capsys.readouterr().out == "\n".join(
        [f"JOB{' ' * 199}STATE", f"{long}  [red]ok", "b", f"job    {long}", "state  ok", ""]
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_faults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", "60")
    faults = [
        Fault("in", 7, "body.messages[0].role", "is [red]", "write one of " + "many, " * 30),
        Fault("in", 12, "", "no JSON", "x"),
    ]
    show_faults(faults, 40)
    shown = capsys.readouterr().err
    for text in ("7", "body.messages[0].role", "is [red]", "no JSON", "what to do"):
        assert text in shown
    assert shown.endswith("... and 38 more; --max-faults lists them\n")
    assert shown.count("many") == 30
