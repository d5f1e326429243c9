"""The table of docs/models.md, made from the supported architectures and the tests' cases.

`python -m tests.minisgl_batch.models.table` writes it there.
"""

from __future__ import annotations

import re
from pathlib import Path

from minisgl_batch.models.families import SUPPORTED_ARCHITECTURES
from tests.minisgl_batch.engine import test_parity
from tests.minisgl_batch.models import test_dense, test_long_context, test_tensor_parallel
from tests.minisgl_batch.models.hf import FAMILIES

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
MODELS = {
    "Gemma3ForCausalLM": "Gemma 3 that reads text alone",
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2 and 3.3",
    "MinistralForCausalLM": "Ministral 8B",
    "Ministral3ForCausalLM": "Ministral 3 that reads text alone",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small and Large",
    "MixtralForCausalLM": "Mixtral",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-30B-A3B and other Qwen3-MoE",
}


def family_of(architecture: str) -> str:
    """What the tests call it."""
    return next(family for family, (_, model) in FAMILIES.items() if model.__name__ == architecture)


def cases_of(family: str) -> list[str]:
    """What its logits are compared for, besides its plain form."""
    names = [name for name, (of, _) in test_dense.CASES.items() if of == family]
    long = [f"{name} at 4 times the length" for name, (of, _) in test_long_context.CASES.items() if of == family]
    return [name.removeprefix(f"{family}, ") for name in names if name != family] + long


def has_plain_case(family: str) -> bool:
    return any(of == family for of, _ in test_dense.CASES.values())


def is_split(family: str) -> bool:
    return any(of == family for of, _ in test_tensor_parallel.CASES.values())


def is_served(family: str) -> bool:
    return family in {*test_parity.FAMILIES, *test_parity.WINDOWED}


def table() -> str:
    """In Markdown."""
    lines = [
        _row("architecture", "models", "variants whose logits are compared", "2 and 4 ranks", "whole engine"),
        _row(*["---"] * 5),
    ]
    for architecture in sorted(SUPPORTED_ARCHITECTURES):
        family = family_of(architecture)
        split, served = ("yes" if checked else "" for checked in (is_split(family), is_served(family)))
        lines.append(_row(f"`{architecture}`", MODELS[architecture], "; ".join(cases_of(family)), split, served))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def in_document(text: str) -> str:
    """The document with the table as it should be."""
    return re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: table(), text, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(in_document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
