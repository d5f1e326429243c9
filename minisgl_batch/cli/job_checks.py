"""Finds out before a job is queued that no worker could use its options, where the engine is installed.

What rows ask for themselves is left to the worker. Called where the options of a job are read.
"""

from __future__ import annotations

from contextlib import closing

from minisgl_batch.engine_extra import missing_engine_modules
from minisgl_batch.errors import InvalidParameterError, RequestError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.hub import model_path
from minisgl_batch.sampling_params import SamplingParams
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


def check_biases(params: SamplingParams, model: str, revision: str | None) -> None:
    """Make sure that a model has the tokens of `logit_bias`.

    Raises:
        InvalidParameterError: it hasn't. ModelError: it can't be read.
    """
    if not params.logit_bias:
        return
    from minisgl_batch.tokenizer.input import bias_problem
    from minisgl_batch.tokenizer.model_defaults import read_model_defaults

    vocab_size = read_model_defaults(model_path(model, revision, weights=False)).vocab_size
    if problem := bias_problem(params.logit_bias, vocab_size):
        raise InvalidParameterError("logit_bias", problem)
