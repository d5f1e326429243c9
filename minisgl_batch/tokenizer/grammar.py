"""From structured outputs to a grammar as llguidance takes it, and what of it can be refused at once.

Knows nothing of tokens. Called where requests are resolved; rank 0 compiles the grammars.
"""

from __future__ import annotations

import json
from functools import lru_cache

import msgspec

from minisgl_batch.errors import RequestError
from minisgl_batch.grammar_check import syntax_problem
from minisgl_batch.messages import Constraint
from minisgl_batch.structured_outputs import StructuredOutputsParams

_MAX_GBNF_RULES = 1000


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


def check_constraint(constraint: Constraint | None) -> None:
    """Raise RequestError for a grammar that is wrong by itself; what it costs, only the engine finds out."""
    if constraint is not None and (problem := _problem(constraint.grammar)):
        raise RequestError("invalid_request", f"structured_outputs: {problem}")


@lru_cache(maxsize=64)  # most prompts have that of the prompt before
def _problem(grammar: str) -> str:
    return syntax_problem(grammar)


@lru_cache(maxsize=64)
def _read_gbnf(grammar: str) -> str:
    """In Lark's syntax, which it may have been already."""
    from llguidance.gbnf_to_lark import any_to_lark

    # The time that reading takes grows with the square of the rules, and other prompts wait for it.
    if (num_rules := grammar.count("::=")) > _MAX_GBNF_RULES:
        raise RequestError(
            "invalid_request",
            f"structured_outputs: the grammar has {num_rules} rules, of at most {_MAX_GBNF_RULES} in GBNF: write it in "
            "Lark's syntax",
        )
    try:
        text: str = any_to_lark(grammar)
    except Exception as error:  # its own parser raises anything
        raise RequestError("invalid_request", f"structured_outputs: the grammar can't be read: {error}") from error
    return text


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})
