"""Any value in any sampling field, by rows and by programs: a clear error, or a run."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_batch import LLM, SamplingParams
from minisgl_batch.errors import Fault, InvalidParameterError, MiniSGLError
from minisgl_batch.outputs import RequestOutput
from minisgl_jobs.rows import ReadOptions, read_rows
from tests.minisgl_batch.test_sampling_params import ANYTHING, FIELDS, GOOD

CHEAP = GOOD | {"n": st.integers(1, 3), "min_tokens": st.integers(0, 9)}
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", seed=0)


@st.composite
def some_fields(draw: st.DrawFn) -> dict[str, Any]:
    fields = draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True))
    return {field: draw(CHEAP[field] | ANYTHING) for field in fields}


def run(llm: LLM, params: SamplingParams, *, chat: bool) -> None:
    """What was accepted runs for some tokens, or the model says why it can't."""
    short: dict[str, Any] = {}
    if params.choices is None:  # which generate nothing
        short = {"max_tokens": max(3, params.min_tokens or 0), "row_timeout": 0.05, "n": min(params.n or 1, 3)}
    params = SamplingParams(**(params.given | short))
    with suppress(MiniSGLError):
        (output,) = llm.generate(MESSAGES if chat else "17 + 25 =", params, progress=False)
        check_output(output, params)


def check_output(output: RequestOutput, params: SamplingParams) -> None:
    assert len(output.outputs) == (params.n or 1)
    assert all(sample.finish_reason in ("stop", "length", "timeout", "repetition") for sample in output.outputs)


@settings(max_examples=60, deadline=None)
@given(some_fields(), st.booleans(), st.booleans())
def test_rows(llm: LLM, fields: dict[str, Any], nested: bool, chat: bool) -> None:
    row = {"prompt": "a", **({"sampling_params": fields} if nested else fields)}
    line = json.dumps(row, default=msgspec.to_builtins)
    (item,) = read_rows([line.encode()], ReadOptions(chat=chat))
    if isinstance(item, Fault):
        assert item.problem
        assert item.hint
        assert any(field in item.field for field in fields) or not item.field
    else:
        run(llm, item.params, chat=chat)


@settings(max_examples=60, deadline=None)
@given(some_fields(), st.booleans())
def test_programs(llm: LLM, fields: dict[str, Any], chat: bool) -> None:
    refused = None
    try:
        run(llm, SamplingParams(**fields), chat=chat)
    except InvalidParameterError as error:
        refused = error
    assert refused is None or (refused.field in fields and refused.reason)
