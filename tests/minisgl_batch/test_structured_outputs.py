"""What users give as structured outputs: one form for equal values, and errors that name the field."""

from __future__ import annotations

from functools import reduce
from typing import Any

import msgspec
import pytest

from minisgl_batch import SamplingParams, StructuredOutputsParams
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.structured_outputs import MAX_GRAMMAR_BYTES, read_response_format

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}


class Answer:
    """As pydantic's models."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize(
    "given",
    [
        {"json": SCHEMA},
        {"json": '{"type": "object"}', "disable_any_whitespace": True},
        {"json": {"$ref": "#/$defs/schema", "$defs": {"schema": SCHEMA}, "schema": {}}},
        {"json": {"title": "Anything"}},
        {"regex": r"\d+"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"json_object": True},
        {},
    ],
)
def test_objects_and_params_are_the_same_and_travel(given: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    assert msgspec.convert(params.to_dict(), SamplingParams) == params


def test_a_row_comes_before_its_job_also_when_it_asks_for_nothing() -> None:
    job = SamplingParams(structured_outputs={"json": SCHEMA}, temperature=1.0)  # type: ignore[arg-type]
    assert SamplingParams(n=2).over(job).structured_outputs == job.structured_outputs
    row = SamplingParams(structured_outputs=read_response_format({"type": "text"}))
    merged = row.over(job)
    assert (merged.structured_outputs, merged.temperature) == (StructuredOutputsParams(), 1.0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (3, "must be an object"),
        ({"jsn": {}}, "'jsn' isn't one of json"),
        ({"json": "{"}, "valid JSON"),
        ({"json": "\ud800"}, "valid JSON"),
        ({"json": [1]}, "is an object"),
        ({"json": {"minimum": 1 << 70}}, "64 bits"),
        ({"json": reduce(lambda inside, _: {"items": inside}, range(2000), {})}, "nested too deeply"),
        ({"json": {"name": "x", "schema": SCHEMA, "strict": True}}, "inside 'schema'"),
        ({"json": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "inside 'json_schema'"),
        ({"json": {"json": SCHEMA}}, "inside 'json'"),
        ({"json": {"title": "A", "proprties": {}}}, "'proprties' isn't one"),
        ({"json": Answer}, r"got .*Answer.*: give its model_json_schema\(\)"),
        ({"json": {}, "regex": "a"}, "json and regex contradict"),
        ({"choice": []}, "at least one"),
        ({"choice": "abc"}, "must be a list"),
        ({"choice": ["a", 3]}, "list of strings"),
        ({"choice": ["a", ""]}, "empty string"),
        ({"choice": ["x"] * 5000}, "at most 4096"),
        ({"regex": ""}, "isn't empty"),
        ({"regex": 3}, "must be a text"),
        ({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "make it smaller"),
        ({"json": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, "make it smaller"),
        ({"json_object": 1}, "true or false"),
        ({"regex": "a", "disable_any_whitespace": True}, "says nothing beside regex"),
    ],
)
def test_errors_name_the_field(given: Any, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem) as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.field == "structured_outputs"


@pytest.mark.parametrize(
    "given", [3, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 3}}]
)
def test_response_formats_that_cant_be_used(given: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        read_response_format(given)
    assert caught.value.field == "response_format"


def test_arguments_by_other_names() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        StructuredOutputsParams(choices=["a"])  # type: ignore[call-arg]
    assert str(caught.value) == "choices: is no field of StructuredOutputsParams; did you mean choice?"


def test_what_ends_by_itself_has_an_end() -> None:
    with pytest.raises(InvalidParameterError, match="contradicts structured_outputs") as caught:
        SamplingParams(ignore_eos=True).over(SamplingParams(structured_outputs={"json_object": True}))  # type: ignore[arg-type]
    assert caught.value.field == "ignore_eos"
    SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams())
