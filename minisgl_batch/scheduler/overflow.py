"""What is said of rows for which the model's logits weren't finite: numbers overflowed while it ran."""

from __future__ import annotations

OVERFLOWED = "numeric_overflow"
"""The error type of such rows."""


def reason(num_output: int, dtype: str) -> str:
    """Why a row ends at its `num_output`-th output token, or in its prompt (0 and less); `dtype` was computed in."""
    place = f"at output token {num_output}" if num_output > 0 else "in the prompt"
    advice = f"in {dtype}, and no type has a wider range; are the model's weights what they should be?"
    if dtype == "float16":
        advice = "in float16; run with --dtype bfloat16 or float32"
    return f"the model's logits aren't finite numbers {place}: numbers overflowed {advice}"
