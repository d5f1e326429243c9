"""Texts that must be something, by the in-process LLM with the demo model: each is parsed and checked again."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from minisgl_batch import LLM, SamplingParams, StructuredOutputsParams
from minisgl_batch.errors import RequestError
from minisgl_batch.scheduler import compiling
from tests.minisgl_batch.schemas import fits, random_schema

QUESTION = "What is 17 + 25?"
DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)) + '\nr3000: "a"'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch, LLM("demo", dtype="float32", seed=0, overlap=True) as llm:
        patch.setattr(compiling, "SLOW", replace(compiling.SLOW, cpu_s=0.3))
        yield llm


def structured(given: dict[str, Any], max_tokens: int = 300, **params: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=given, max_tokens=max_tokens, **params)


def random_params(schema: dict[str, Any]) -> SamplingParams:
    """White space between the parts would be most of what a model of this size writes."""
    draw = {"temperature": random.choice([0.0, 0.8, 1.5]), "top_p": random.choice([1.0, 0.9])}
    return structured({"json": schema, "disable_any_whitespace": True}, seed=random.randrange(99), **draw)


def test_random_schemas_hold_whatever_happens_to_rows() -> None:
    """With few pages rows give way to others; with a small budget prompts are computed in pieces."""
    sizes = {"page_size": 4, "num_pages": 64, "max_seq_len": 256, "max_running": 16, "max_prefill_tokens": 24}
    llm = LLM("demo", dtype="float32", overlap=True, mixed=random.random() < 0.5, **sizes)
    for _ in range(5):  # hardly ever more than once: whether rows give way depends on what is drawn
        generate_random_schemas(llm)
        if llm.stats().num_retractions:
            break
    assert llm.stats().num_retractions > 0


def generate_random_schemas(llm: LLM) -> None:
    schemas = [random_schema() for _ in range(20)]
    params = [random_params(schema) for schema in schemas]
    params += [structured({"regex": "[a-d ]{50}"}, 60, temperature=1.0, seed=i) for i in range(10)]
    prompts = [f"{'Well. ' * random.randrange(12)}What is {i} + 1?" for i in range(30)]
    made = [output.outputs[0] for output in llm.generate(prompts, params, progress=False)]
    assert {one.finish_reason for one in made} == {"stop"}
    for one, schema in zip(made, schemas, strict=False):
        assert fits(json.loads(one.text), schema), (one.text, schema)
    assert all(re.fullmatch("[a-d ]{50}", one.text) for one in made[20:])


def test_each_kind_and_what_stands_beside_it(llm: LLM) -> None:
    cases: list[tuple[SamplingParams, str]] = [
        (structured({"regex": "[a-c]{3,5}x?"}), "[a-c]{3,5}x?"),
        (structured({"choice": ["yes", "no", "mäh\n"]}), "yes|no|mäh\n"),
        (structured({"choice": [random.randbytes(10).hex() for _ in range(4096)]}), "[0-9a-f]{20}"),
        (structured({"grammar": 'start: "a" b+\nb: "x" | "y" "z"'}, 40, temperature=1.0), "a(x|yz)+"),
        (structured({"grammar": 'root ::= "u" [0-9] | "v"'}), "u[0-9]|v"),
        # llguidance would drop the zeros, take the rest for another character, and && for an operator.
        (
            structured({"grammar": r'root ::= "\u00e9\[\U0001F642\x41\u000a" [\u00e9abc] [x&&~~]'}),
            "é\\[🙂A\n[éabc][x&~]",
        ),
        (
            structured({"grammar": 'root ::= start start-2 "start" # start ::=\nstart ::= "a"\nstart-2 ::= "b"'}),
            "abstart",
        ),
        (structured({"grammar": 'start[temperature=0.5]: "a ::= b"'}), "a ::= b"),
        # Nothing else may come, so end-of-sequence does.
        (structured({"choice": ["yes", "no"]}, 50, min_tokens=40), "yes|no"),
        (structured({"regex": "[ab]{4}"}, logit_bias=dict.fromkeys(range(300), -100.0)), "[ab]{4}"),
        (structured({"regex": "(ab|cd){3}"}, frequency_penalty=2.0, temperature=1.0, top_k=3), "(ab|cd){3}"),
        (structured({"regex": "a{9}"}, stop="aaa"), ""),
        (structured({"regex": "a{9}"}, bad_words=["a", "aa", "aaa"]), "a{9}"),
    ]
    outputs = llm.generate([QUESTION] * len(cases), [params for params, _ in cases], progress=False)
    for output, (_, pattern) in zip(outputs, cases, strict=True):
        (made,) = output.outputs
        assert made.finish_reason == "stop"
        assert re.fullmatch(pattern, made.text), made.text
    (output,) = llm.generate(QUESTION, structured({"regex": "[a-z]{1,9}"}, n=3, temperature=2.0), progress=False)
    assert all(re.fullmatch("[a-z]{1,9}", made.text) for made in output.outputs)
    assert len({made.text for made in output.outputs}) > 1
    (cut,) = llm.generate(QUESTION, structured({"json_object": True}, 3), progress=False)
    assert (cut.outputs[0].finish_reason, cut.outputs[0].text[0]) == ("length", "{")


def test_others_are_what_they_are_alone(llm: LLM) -> None:
    free = SamplingParams(max_tokens=12, seed=3, temperature=1.0, logprobs=1)
    alone = llm.generate([QUESTION] * 3, free, progress=False)
    layers = [free, structured({"regex": "[0-9]{20}"}, logprobs=1), free, structured({"json_object": True}, 9), free]
    beside = llm.generate([QUESTION] * 5, layers, progress=False)
    assert [beside[i].outputs for i in (0, 2, 4)] == [output.outputs for output in alone]
    made = beside[1].outputs[0]
    assert made.cumulative_logprob is not None
    assert made.cumulative_logprob < -20  # the model's own, before anything is ruled out


def test_a_dead_end_ends_the_row_alone(llm: LLM) -> None:
    dead = structured({"grammar": 'start: "a" B\nB: /[^\\x00-\\U0010FFFF]/'})
    good, bad = llm.generate([QUESTION] * 2, [SamplingParams(max_tokens=5), dead], progress=False)
    assert good.outputs[0].finish_reason == "stop"
    assert (bad.outputs[0].finish_reason, bad.outputs[0].text) == ("error", "a")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "a\\"}, "ends with a backslash"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "start: start"}, "no text can be one of the grammar"),
        ({"grammar": 'other: "a"'}, "start"),
        ({"grammar": "root ::= (("}, "Expected"),
        (
            {"grammar": 'root ::= "a"\n' + f'x ::= "{"b" * 90}"\n' * 1000},
            "1001 rules in 99013 bytes, .* may have 33520 bytes",
        ),
        ({"json": {"type": "integer", "multipleOf": 99_999_989}}, "too complex"),
        ({"grammar": DEEP}, "too complex"),  # on which llguidance runs out of its stack, and the process dies
    ],
)
def test_what_cant_be_used_is_named(llm: LLM, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=f"prompt 1: structured_outputs: .*{problem}"):
        llm.generate([QUESTION] * 2, [SamplingParams(max_tokens=2), structured(given)], progress=False)
    assert llm.chat([{"role": "user", "content": QUESTION}], progress=False)[0].outputs[0].text == "42"


def test_a_stream_that_is_left_leaves_nothing(llm: LLM) -> None:
    """Whether its rows run, or wait for their grammars."""
    endless = [structured({"regex": "[a-z]{200}"}), structured({"regex": f"[a-c]{{{random.randint(50, 99)}}}"})]
    for _ in llm.stream([QUESTION] * 2, endless):
        break
    assert not llm._engine.scheduler._constraints._rows
    assert llm.stats().num_running == 0
    (output,) = llm.generate(QUESTION, structured({"regex": "[a-c]{3}"}), progress=False)
    assert re.fullmatch("[a-c]{3}", output.outputs[0].text)
    assert not llm._engine.scheduler._constraints._rows


def test_params_as_in_vllm(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["one", "two"]), max_tokens=9)
    assert llm.generate(QUESTION, params, progress=False)[0].outputs[0].text in ("one", "two")


SCHEMA = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["small", "large", None]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 0, "maxItems": 3},
    },
    "required": ["sum", "kind", "flags"],
    "additionalProperties": False,
}


def texts_of_a_schema(num_rows: int, **options: Any) -> list[str]:
    """Greedy rows, drawn ones, and ones with filters and penalties, beside some that are free; all are checked."""
    draws: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.2}, {"temperature": 1.2, "top_p": 0.9}]
    draws.append({"temperature": 1.0, "frequency_penalty": 0.3, "min_tokens": 5})
    given = {"json": SCHEMA, "disable_any_whitespace": True}
    params = [structured(given, 200, seed=i, **draws[i % 4]) for i in range(num_rows)]
    params += [SamplingParams(max_tokens=30, min_tokens=20)] * (num_rows // 20)
    with LLM("demo", max_running=256, **options) as llm:
        outputs = llm.generate([f"What is {i} + {i % 7}?" for i in range(len(params))], params, progress=False)
    made = [output.outputs[0] for output in outputs[:num_rows]]
    for one in made:
        assert one.finish_reason == "stop"
        assert fits(json.loads(one.text), SCHEMA), one.text
    assert len({one.text for one in made}) > num_rows // 50
    return [one.text for one in made]


@pytest.mark.full
def test_a_thousand_rows_of_a_schema() -> None:
    texts_of_a_schema(1000, overlap=True)


@pytest.mark.gpu
def test_masks_arrive_in_time_on_a_gpu() -> None:
    """With CUDA graphs, while the host is a step behind; and without either."""
    ways: list[dict[str, Any]] = [{"overlap": True}, {"overlap": False, "cuda_graph_max_bs": 0}]
    first, second = (texts_of_a_schema(1000, device="cuda", **options) for options in ways)
    assert sum(a == b for a, b in zip(first, second, strict=True)) > 700  # kernels of other sizes round otherwise


@pytest.mark.multigpu
def test_rank_0s_masks_arrive_on_other_gpus() -> None:
    texts_of_a_schema(300, device="cuda", tp=2, check_ranks=5)
