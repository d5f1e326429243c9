"""Finds out before a job is queued that no worker could use its structured outputs, where llguidance is installed.

What rows ask for themselves is left to the worker. Called where the options of a job are read.
"""

from __future__ import annotations

from contextlib import closing

from minisgl_batch.cli.worker import missing_engine_modules
from minisgl_batch.errors import RequestError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.structured_outputs import StructuredOutputsParams


def grammar_problem(asked: StructuredOutputsParams) -> str:
    """Why these can't be used, "" if they can or only a worker can tell."""
    if missing_engine_modules():
        return ""
    from minisgl_batch.tokenizer.grammar import make_grammar

    try:
        grammar = make_grammar(asked)
    except RequestError as error:
        return str(error).removeprefix("structured_outputs: ")
    with closing(GrammarCheck()) as check:
        return check.problem(grammar) if grammar else ""
