"""Tables of README.md and docs/ that are made from the code: `python -m tests.tables` writes them.

A table stands between two comments, of which the first names it. Called by `test_tables.py`, which fails when one is
not as it should be.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from minisgl_batch.cli.options import sampling_options
from minisgl_batch.models.families import MODELS
from minisgl_batch.sampling_params import MAX_ITEMS, NEUTRAL, REAL_FIELDS, WHOLE_FIELDS, SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams

ROOT = Path(__file__).parents[1]
TABLES = {
    "README.md": {"models": "tests.tables:models", "sampling": "tests.tables:sampling"},
    "docs/models.md": {"compared": "tests.minisgl_batch.models.table:compared_models"},
}
# The fields of vLLM's SamplingParams that are fields of ours.
_OF_VLLM = frozenset(
    {
        "n",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "bad_words",
        "logprobs",
        "prompt_logprobs",
        "structured_outputs",
    }
)
_KINDS = {bool: "flag", dict: "object", int: "number", str: "text", StructuredOutputsParams: "object"}


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def models() -> str:
    """The architectures of the registry."""
    return markdown(("architecture", "models"), [(f"`{name}`", MODELS[name]) for name in sorted(MODELS)])


def sampling() -> str:
    """The fields of SamplingParams, as they are declared, documented and checked; with a star, those vLLM's hasn't."""
    options, meanings = job_options(), documented(SamplingParams)
    rows = [
        (
            f"`{field}`" + ("" if field in _OF_VLLM else " \\*"),
            options[field],
            values(field),
            default(field),
            meanings[field],
        )
        for field in SamplingParams.__struct_fields__
    ]
    return markdown(("row, `SamplingParams`", "job", "values", "default", "meaning"), rows)


def job_options() -> dict[str, str]:
    """Field -> option of `run` and `submit`."""

    @sampling_options
    def command() -> None:
        raise NotImplementedError

    return {option.name: f"`{max(option.opts, key=len)}`" for option in command.__click_params__}  # type: ignore[attr-defined]


def documented(kind: type) -> dict[str, str]:
    """What the docstring says of each attribute."""
    _, _, section = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    section = re.split(r"\n\n(?=\S)", section)[0]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).rstrip(".") for names, text in entries for name in names.split(", ")}


def values(field: str) -> str:
    """What a field can be."""
    if field in WHOLE_FIELDS:
        low, high = WHOLE_FIELDS[field]
        return f"{low} to {_number(high)}"
    if field in REAL_FIELDS:
        low, high, low_open = REAL_FIELDS[field]
        return f"above {low:g}, to {_number(high)}" if low_open else f"{low:g} to {_number(high)}"
    kinds = get_args(get_type_hints(SamplingParams)[field])
    most = f", at most {MAX_ITEMS[field]:,}" if field in MAX_ITEMS else ""
    return " or ".join(_kind(kind) for kind in kinds if kind is not NoneType) + most


def default(field: str) -> str:
    """What holds where row, job and the model's generation config say nothing."""
    value = getattr(NEUTRAL, field)
    return "" if value is None or value in ((), {}) else f"`{str(value).lower()}`"


def in_document(text: str, tables: dict[str, str]) -> str:
    """A document with the tables as they should be.

    Args:
        tables: name -> module:function that makes it.
    """
    for name, maker in tables.items():
        module, _, function = maker.partition(":")
        table = getattr(import_module(module), function)()
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end of table -->")
        assert begin, f"the document has no place for the table {name}"
        assert end, f"the document doesn't say where the table {name} ends"
        text = before + begin + table + end + after
    return text


def _kind(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is tuple:
        return f"list of {_kind(get_args(kind)[0])}s"
    return ", ".join(f"`{choice}`" for choice in get_args(kind)) if origin is Literal else _KINDS[origin]


def _number(value: float) -> str:
    return f"{value:,}".removesuffix(".0")


if __name__ == "__main__":
    for name, tables in TABLES.items():
        document = ROOT / name
        document.write_text(in_document(document.read_text(encoding="utf-8"), tables), encoding="utf-8")
