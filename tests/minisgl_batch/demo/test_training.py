"""The pieces of the training script; the script itself runs a few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from minisgl_batch.demo.data import Generator
from minisgl_batch.demo.kinds import KINDS
from minisgl_batch.demo.tokenizer import build_tokenizer, encode_conversation
from minisgl_batch.demo.train import LONG_EVERY, Batches, loss_of, new_model, report
from minisgl_batch.hub import DEMO_MODEL, model_path


@pytest.fixture(scope="module")
def small_tokenizer() -> Tokenizer:
    return build_tokenizer(seed=3, num_conversations=500)


def test_a_batch_depends_on_the_seed_and_the_step_alone(small_tokenizer: Tokenizer) -> None:
    first, second = (Batches(small_tokenizer, seed=9, num_steps=100, batch_tokens=1024) for _ in range(2))
    for step in (0, LONG_EVERY - 1):
        first[step + 1]
        for name, tensor in first[step].items():
            assert torch.equal(tensor, second[step][name]), (step, name)


def test_packed_conversations_do_not_see_each_other(small_tokenizer: Tokenizer, seed: int) -> None:
    torch.set_num_threads(1)
    model = new_model(seed)
    batch = Batches(small_tokenizer, seed, num_steps=1, batch_tokens=512)[0]
    generator = Generator(f"{seed}:0")
    total, num_learned = 0.0, 0
    while num_learned < len(batch["target"]):
        ids, learned = encode_conversation(small_tokenizer, generator.short_conversation())
        alone = torch.tensor([ids])
        log_probs = model(alone).logits.log_softmax(-1)[0]
        for index in range(1, len(ids)):
            if learned[index]:
                total -= log_probs[index - 1, ids[index]].item()
                num_learned += 1
    assert num_learned == len(batch["target"])
    torch.testing.assert_close(loss_of(model, batch).item(), total / num_learned, atol=1e-4, rtol=0)


def test_the_script_trains_and_writes_a_model_folder(tmp_path: Path) -> None:
    arguments = [
        "--output",
        str(tmp_path),
        "--steps",
        "6",
        "--batch-tokens",
        "512",
        "--device",
        "cpu",
        "--loaders",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "minisgl_batch.demo.train", *arguments, "--evaluate", "0"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] - 0.3
    assert {path.name for path in tmp_path.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_report_shows_each_kind_in_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    report(model_path(DEMO_MODEL), "cpu", num_per_kind=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(KINDS) + 2]] == [*KINDS, "all"]
    assert all(float(figure) >= 75 for figure in lines[len(KINDS) + 1].split()[1:])
