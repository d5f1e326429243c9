"""What FP8 weights change on the demo model stays small."""

from __future__ import annotations

from tests.bench.accuracy import compare


def test_answers_of_the_demo_model_hardly_change() -> None:
    result = compare(6)
    assert result["answers"] == 6
    assert result["tokens"] > 20
    assert result["same_tokens"] > 0.97
    assert result["same_answers"] >= 0.8
    assert 0.0 < result["mean_kl"] < 1e-3
