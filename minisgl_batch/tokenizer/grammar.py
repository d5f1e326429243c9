"""From structured outputs to a grammar as llguidance takes it, and what of it can be refused at once.

Knows nothing of tokens. Called where requests are resolved; rank 0 compiles the grammars.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

import msgspec

from minisgl_batch.errors import RequestError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.messages import Constraint
from minisgl_batch.structured_outputs import StructuredOutputsParams

_MAX_GBNF_WORK = 1 << 25  # rules x bytes, by which the time of reading grows (to 1 s); other prompts wait for it
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*(\[[^\]\n]*\])?\s*:(?!:=))")
# Of GBNF: comments, literals, classes of characters, and a name that is another's in Lark.
_GBNF_PIECE = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|(?<![\w-])start(?![\w-])', re.DOTALL)
_GBNF_CHAR = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)|[&~]", re.DOTALL)


def make_grammar(params: StructuredOutputsParams) -> str:
    """The grammar, "" where the text is free. That it can be compiled isn't sure.

    Raises:
        RequestError: a GBNF grammar isn't one, or an expression ends too early.
    """
    if (schema := params.schema) is not None:
        given = {"x-guidance": {"whitespace_flexible": False}} if params.disable_any_whitespace else {}
        return f'{{"grammars":[{{"json_schema":{msgspec.json.encode(schema | given).decode()}}}]}}'
    if params.choice is not None:
        # One terminal: as many as there are texts would be too many for a parser's row.
        return _lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in params.choice))
    if params.regex is not None:
        from llguidance import LLMatcher

        if (len(params.regex) - len(params.regex.rstrip("\\"))) % 2:  # which llguidance would drop
            raise RequestError("invalid_request", "structured_outputs: the regex ends with a backslash of no meaning")
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return _lark(_read_gbnf(params.grammar) if "::=" in params.grammar else params.grammar)
    return ""


def check_constraint(constraint: Constraint | None, check: GrammarCheck) -> None:
    """Raise RequestError for a grammar that is wrong by itself; what it costs, only the engine finds out."""
    if constraint is not None and (problem := check.syntax_problem(constraint.grammar)):
        raise RequestError("invalid_request", f"structured_outputs: {problem}")


@lru_cache(maxsize=64)
def _read_gbnf(grammar: str) -> str:
    """In Lark's syntax, which it may have been already."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(grammar):
        return grammar
    num_rules, num_bytes = grammar.count("::="), len(grammar.encode())
    if num_rules * num_bytes > _MAX_GBNF_WORK:
        raise RequestError(
            "invalid_request",
            f"structured_outputs: the grammar has {num_rules} rules in {num_bytes} bytes, which is too much for GBNF: "
            f"so many rules may have {_MAX_GBNF_WORK // num_rules} bytes. Write it in Lark's syntax",
        )
    try:
        text: str = gbnf_to_lark(_GBNF_PIECE.sub(_plain_piece, grammar))
    except Exception as error:  # its own parser raises anything
        raise RequestError("invalid_request", f"structured_outputs: the grammar can't be read: {error}") from error
    return text


def _plain_piece(found: re.Match[str]) -> str:
    """A piece of GBNF as `gbnf_to_lark` understands it: what it copies means the same in Lark and its expressions."""
    piece = found[0]
    if piece == "start":
        return "gbnf-start"
    return piece if piece.startswith("#") else _GBNF_CHAR.sub(_plain_char, piece)


def _plain_char(found: re.Match[str]) -> str:
    char, is_in_class = found[0], found.string.startswith("[")
    if digits := found[1] or found[2]:
        code = int(digits, 16)
        if code < 0x80:
            return f"\\x{code:02x}"
        return chr(code) if code < 0xD800 or 0xDFFF < code <= 0x10FFFF else char
    if char in ("&", "~"):  # two of them are an operator of Rust's classes
        return f"\\x{ord(char):02x}" if is_in_class else char
    return char[1:] if char in (r"\[", r"\]") and not is_in_class else char


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})
