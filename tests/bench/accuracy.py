"""What FP8 weights change in the demo model's answers, one JSON line.

    python -m tests.bench.accuracy --limit 224

The model without answers the examples greedily, and both compute the logits behind each token of these answers:
`same_tokens` is the share whose best token is the same, `mean_kl` the mean Kullback-Leibler divergence of the model in
FP8 from the one without, in nats. `same_answers` is the share of answers that the model in FP8 gives alike by itself.
On CPUs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from minisgl_batch import LLM, SamplingParams
from minisgl_batch.config import Quantization
from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.hub import model_path
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import load_weights
from tests.minisgl_batch.models.contiguous import sequence_logits

MODEL = "demo"
EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
MAX_TOKENS = 64


def answers(prompts: list[Any], quantization: Quantization | None) -> list[tuple[list[int], list[int]]]:
    """The token ids of each prompt and of its greedy answer, by the engine."""
    llm = LLM(MODEL, device="cpu", dtype="float32", quantization=quantization)
    outputs = llm.chat(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0), progress=False)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


@torch.inference_mode()
def log_probs(texts: list[tuple[list[int], list[int]]], *, fp8: bool) -> torch.Tensor:
    """(num_tokens, vocab_size) behind each token of all answers but the last, and behind each prompt."""
    path = model_path(MODEL)
    config = load_model_config(path)
    model = make_model(config.quantized(at_load=False) if fp8 else config, SINGLE, torch.float32, torch.device("cpu"))
    load_weights(model, path)
    sequences = [prompt + answer[:-1] for prompt, answer in texts]
    logits = sequence_logits(model, sequences, [len(sequence) - 1 for sequence in sequences])
    return torch.cat([rows[len(prompt) - 1 :] for rows, (prompt, _) in zip(logits, texts, strict=True)]).log_softmax(-1)


def compare(limit: int) -> dict[str, Any]:
    """As the module says, for the first examples."""
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()[:limit]]
    prompts = [row["messages"] for row in rows]
    plain = answers(prompts, None)
    alike = [a == b for a, b in zip(plain, answers(prompts, "fp8"), strict=True)]
    want, got = log_probs(plain, fp8=False), log_probs(plain, fp8=True)
    same = (want.argmax(-1) == got.argmax(-1)).float().mean()
    kl = (want.exp() * (want - got)).sum(-1).mean()
    return {
        "model": MODEL,
        "answers": len(prompts),
        "tokens": len(want),
        "same_tokens": round(float(same), 5),
        "mean_kl": float(f"{kl:.3g}"),
        "same_answers": round(sum(alike) / len(alike), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=224, help="of the examples")
    print(json.dumps(compare(parser.parse_args().limit)))


if __name__ == "__main__":
    main()
