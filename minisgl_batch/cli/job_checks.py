"""Finds out before a job is queued that no worker could use its options, where the engine or the model is here.

What rows ask for themselves is left to the worker, which refuses such rows, but for tools, which it can only drop.
Called where the options of a job are read, or a job is queued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from minisgl_batch.chat_template import drop_tools
from minisgl_batch.cli.console import talk
from minisgl_batch.client.advice import dropped_tools
from minisgl_batch.engine_extra import missing_engine_modules
from minisgl_batch.errors import InvalidParameterError, RequestError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.hub import model_path
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams
from minisgl_jobs.submission import Submission


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


def warn_of_dropped_tools(submission: Submission, folder: Path) -> None:
    """Say it when the chat template in a model's folder, if there is one, takes no notice of tools that were given."""
    if submission.has_tools and drop_tools(_chat_templates(folder)):
        talk(f"warning: {dropped_tools(submission.spec.model)}")


def _chat_templates(folder: Path) -> Iterator[str]:
    """All that a model has, wherever transformers looks for them; what can't be read, loading the model tells."""
    for path in (*folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*.jinja")):
        with suppress(OSError):
            yield path.read_text(encoding="utf-8", errors="replace")
    for name in ("tokenizer_config.json", "chat_template.json"):
        with suppress(OSError, ValueError, RecursionError):
            found: Any = json.loads((folder / name).read_text(encoding="utf-8"))
            if isinstance(found, dict) and (template := found.get("chat_template")):
                yield template if isinstance(template, str) else json.dumps(template)  # several: a list of objects
