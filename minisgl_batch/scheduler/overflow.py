"""What is said of rows for which the model's logits weren't finite: numbers overflowed while it ran.

Called by the scheduler, which ends them.
"""

from __future__ import annotations

from minisgl_batch.batch import IntArray
from minisgl_batch.scheduler.table import TableManager

OVERFLOWED = "numeric_overflow"
"""The error type of such rows."""


def failures(table: TableManager, slots: IntArray, positions: IntArray, dtype: str) -> list[tuple[int, str]]:
    """(uid, why) of rows; the logits at fault were those for the tokens at `positions`, and computed in `dtype`."""
    num_output = positions + 1 - table.num_prompt[slots]
    return [
        (uid, f"the model's logits aren't finite numbers {_place(number)}: {_advice(dtype)}")
        for uid, number in zip(table.uid[slots].tolist(), num_output.tolist(), strict=True)
    ]


def _place(num_output: int) -> str:
    return f"at output token {num_output}" if num_output > 0 else "in the prompt"


def _advice(dtype: str) -> str:
    if dtype == "float16":
        return "numbers overflowed in float16; run with --dtype bfloat16 or float32"
    return f"numbers overflowed in {dtype}, and no type has a wider range; are the model's weights what they should be?"
