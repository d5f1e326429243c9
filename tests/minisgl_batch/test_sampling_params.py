"""What users may set: ranges, one form for equal values, layers, and the way through records."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_batch.errors import InvalidParameterError, UsageError
from minisgl_batch.sampling_params import NEUTRAL, WHOLE_FIELDS, SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams

FIELDS = SamplingParams.__struct_fields__


def reals(low: float, high: float) -> st.SearchStrategy[float]:
    """Not `st.floats`: a process that has loaded fast C++ kernels takes the smallest doubles for 0."""
    return st.integers(round(low * 1000), round(high * 1000)).map(lambda n: n / 1000)


STRINGS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | reals(-9, 9) | STRINGS
OBJECTS = st.dictionaries(
    STRINGS.filter(lambda name: len(name) < 4),  # no argument of the renderer's own is so short
    st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3)),
    max_size=3,
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 1024),
    "temperature": reals(0, 100) | st.integers(0, 100),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": reals(0.001, 1) | st.just(1),
    "min_p": reals(0, 1),
    "seed": st.integers(0, 2**63 - 1),
    "max_tokens": st.integers(100, 1 << 24),
    "stop": STRINGS | st.lists(STRINGS, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=3),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "presence_penalty": reals(-2, 2) | st.integers(-2, 2),
    "frequency_penalty": reals(-2, 2),
    "repetition_penalty": reals(0.01, 100),
    "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), reals(-100, 100) | st.integers(-100, 100), max_size=3),
    "min_tokens": st.integers(0, 100),
    "bad_words": STRINGS | st.lists(STRINGS, max_size=3),
    "logprobs": st.integers(0, 20) | st.just(False),
    "prompt_logprobs": st.integers(0, 20) | st.just(False),
    "truncate": st.sampled_from(["error", "left", "right"]),
    "tools": st.lists(OBJECTS, max_size=3),
    "chat_template_kwargs": OBJECTS,
    "continue_final_message": st.booleans(),
    "row_timeout": reals(0.001, 1e6) | st.integers(1, 10**9),
    "repetition_guard": st.integers(16, 1 << 24),
    "split_reasoning": st.booleans(),
    "stop_in_reasoning": st.booleans(),
    "structured_outputs": st.one_of(
        st.builds(StructuredOutputsParams, json=OBJECTS.map(lambda value: {"const": value})),
        st.builds(StructuredOutputsParams, json_object=st.booleans(), disable_any_whitespace=st.booleans()),
        st.builds(StructuredOutputsParams, choice=st.lists(STRINGS, min_size=1, max_size=3)),
        st.builds(StructuredOutputsParams, regex=STRINGS),
        st.builds(StructuredOutputsParams),
    ),
    "choices": st.lists(STRINGS, min_size=1, max_size=3, unique=True),
}
ALONE = {"choices"}  # little means something beside it
TOGETHER = {field: good for field, good in GOOD.items() if field not in ALONE} | {"ignore_eos": st.just(False)}
PARAMS = st.fixed_dictionaries({}, optional=TOGETHER)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0.5, 2.0, -1e300, math.inf, math.nan])
    | st.text(max_size=3)
    | st.sampled_from(["\ud800", 1 << 70]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def test_every_field_is_fuzzed() -> None:
    assert set(GOOD) == set(FIELDS)


@given(PARAMS | st.fixed_dictionaries({field: GOOD[field] for field in ALONE}) | st.just({"ignore_eos": True}))
def test_good_values_survive_records(given_fields: dict[str, Any]) -> None:
    params = SamplingParams(**given_fields)
    for protocol in (msgspec.json, msgspec.msgpack):
        encoded = protocol.encode(params)
        assert protocol.decode(encoded, type=SamplingParams) == params
    for field, value in given_fields.items():
        kept = getattr(params, field)
        assert kept == (tuple(value) if isinstance(value, list) else value)
    assert SamplingParams(**{name: value for name in FIELDS if (value := getattr(params, name)) is not None}) == params


@given(st.sampled_from(FIELDS), ANYTHING)
def test_anything_else_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    refused = None
    try:
        params = SamplingParams(**{field: value})
    except InvalidParameterError as error:
        refused = error
    if refused is not None:
        assert refused.field == field
        assert refused.reason
        return
    assert (getattr(params, field) is None) == (value is None)
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


@given(st.sampled_from(sorted(WHOLE_FIELDS)), st.data())
def test_whole_floats_are_whole_numbers(field: str, data: st.DataObject) -> None:
    """As pandas has columns of numbers with gaps."""
    low, high = WHOLE_FIELDS[field]
    number = data.draw(st.integers(low, min(high, 1 << 53)))
    params = SamplingParams(**{field: float(number)})
    assert type(getattr(params, field)) is int
    assert params == SamplingParams(**{field: number})
    with pytest.raises(InvalidParameterError, match="must be a whole number"):
        SamplingParams(**{field: number % 1000 + 0.5})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("presence_penalty", [-2.01, 2.01, math.nan, True, "1"]),
        ("frequency_penalty", [-3, 3, math.inf, [1]]),
        ("repetition_penalty", [0, 1e-38, -1, 100.5, math.nan, False]),
        (
            "logit_bias",
            [
                [1],
                "5",
                {"x": 1},
                {-1: 1},
                {1.5: 1},
                {5: 101},
                {5: math.nan},
                {True: 1},
                {None: 1},
                {5: "1"},
                {"1" * 30: 1},
            ],
        ),
        ("stop_token_ids", [5, list(range(257)), [None], [1.0], [True], [-1], ["5"]]),
        ("logprobs", [-1, 21, True, 1.5]),
        ("prompt_logprobs", [-1, 21, "1"]),
        ("min_tokens", [-1, 1.5, True, 1 << 25]),
        ("truncate", ["middle", True, ["left"]]),
        ("tools", ["x", {}, ["x"], [{"x": math.nan}], [{"x": 1 << 64}], [{1: 2}], [{"x": "\ud800"}], [{"x": {1, 2}}]]),
        ("chat_template_kwargs", ["x", [], {"tools": []}, {"tokenize": True}, {"x": 1 << 64}, {1: 2}, {"x": (1,)}]),
        ("row_timeout", [0, -1, math.inf, "5", True]),
        ("repetition_guard", [0, 15, 16.5, True]),
        ("continue_final_message", [1, "yes"]),
        ("bad_words", [5, [5], [""], "", ["\ud800"], ["a"] * 2049]),
    ],
)
def test_values_out_of_range(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidParameterError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field


def test_equal_values_have_one_form() -> None:
    a = SamplingParams(logit_bias={"7": 1, 5: 2.0, "9": None}, presence_penalty=1, bad_words=["x"])
    b = SamplingParams(logit_bias={5: 2, 7: 1.0}, presence_penalty=1.0, bad_words=("x",))
    assert a == b
    assert msgspec.json.encode(a) == msgspec.json.encode(b)


@pytest.mark.parametrize("bias", [{5: 1, "5": 2}, {"5": 1, "05": 1}, dict.fromkeys(range(2049), 1)])
def test_biases_that_contradict_or_are_too_many(bias: dict[Any, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=r"twice|at most 2048"):
        SamplingParams(logit_bias=bias)


@given(PARAMS, PARAMS)
def test_layers(upper: dict[str, Any], lower: dict[str, Any]) -> None:
    merged = SamplingParams(**upper).over(SamplingParams(**lower))
    assert merged == SamplingParams(**(lower | upper))
    assert SamplingParams().over(NEUTRAL) == NEUTRAL


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("best_of", 2, "isn't supported: use n with logprobs"),
        ("max_token", 5, "is no sampling parameter; did you mean max_tokens?"),
        ("max_new_tokens", 5, "is no sampling parameter; did you mean max_tokens?"),
        ("colour", "red", "is no sampling parameter"),
    ],
)
def test_parameters_that_there_are_not(field: str, value: Any, problem: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(n=1, **{field: value})
    assert (caught.value.field, caught.value.reason[: len(problem)]) == (field, problem)


def test_values_without_a_name() -> None:
    with pytest.raises(UsageError, match=r"^SamplingParams takes arguments by name, such as n=.* or .*: name 0\.5$"):
        SamplingParams(0.5)  # type: ignore[misc]
    with pytest.raises(UsageError, match=r"^StructuredOutputsParams takes arguments by name, .*: name 'a'$"):
        StructuredOutputsParams("a")  # type: ignore[misc]


def test_parameters_of_others_that_change_nothing_are_passed_over() -> None:
    params: dict[str, Any] = {"best_of": 1, "skip_special_tokens": True, "use_beam_search": None}
    assert SamplingParams(n=2, **params) == SamplingParams(n=2)


def test_only_what_was_set_is_shown() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(n=2, stop="x", logprobs=False)) == "SamplingParams(n=2, stop='x', logprobs=False)"


def test_layers_that_contradict_each_other() -> None:
    with pytest.raises(InvalidParameterError, match="min_tokens: must be at most max_tokens, which is 5, got 6"):
        SamplingParams(min_tokens=6).over(SamplingParams(max_tokens=5))
