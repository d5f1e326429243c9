"""What `tests.bench.host` checks of a tensor-parallel group, one process a check: a line of JSON for each finding.

    python -m tests.bench.host_checks ids --tp 8 [--model two-kv-heads] [--device cpu] [--rows 6] [--tokens 8]
    python -m tests.bench.host_checks groups --tp 4 [--device cpu] [--rows 40] [--tokens 40] [--leave-early]

`ids`: greedy ids of the group are those of one rank in float32, and when a rank is killed in the middle of a call the
caller learns which one, and nothing is left over. The model is "demo", or "two-kv-heads": random weights, 8 query heads
over 2 KV heads, which more ranks than two hold copies of. On GPUs the demo model runs in bfloat16 too, which kernels of
ours sum in; there rounding differs, and a few rows may.

`groups`: two worker groups share a queue, one loses a rank in the middle of the job, the dataset has every row once,
with the ids of one rank, and the group comes back (which isn't waited for with --leave-early).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from minisgl_batch import LLM, SamplingParams
from minisgl_batch.child_process import DUMP_STACKS_ENV, setup_logging
from minisgl_batch.client import Client, JobHandle
from minisgl_batch.errors import WorkerError
from minisgl_batch.hub import model_path
from minisgl_jobs.model import JobState
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.bench.records import about
from tests.jobs.helpers import wait_for
from tests.processes import Command

SAME_IN_BF16 = 0.9
CHUNK_ROWS = 4
LEASE_S = 2
DEATH_S = 20.0  # "within seconds", on a machine that does much else
WAIT_S = 120.0
TWO_KV_HEADS = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
}
RANKS = ("minisgl_workers.rank", "minisgl_batch.scheduler.follower")
Ids = list[list[int]]
Finding = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=["ids", "groups"])
    parser.add_argument("--model", choices=["demo", "two-kv-heads"], default="demo")
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=32, help="of each row")
    parser.add_argument("--leave-early", action="store_true", help="see above")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--timeout-s", type=float, help="say where it hangs and end after this time")
    given = parser.parse_args()
    setup_logging(f"{given.check} {given.model} tp {given.tp}")
    if given.timeout_s is not None:
        os.environ[DUMP_STACKS_ENV] = "1"
        faulthandler.dump_traceback_later(given.timeout_s, exit=True)
    random.seed(given.seed)
    context = about("tests.bench.host_checks")
    passed = True
    with tempfile.TemporaryDirectory(prefix="mb-") as folder:
        for finding in (ids if given.check == "ids" else groups)(given, Path(folder)):
            line = {"engine": "minisgl-batch", "model": given.model, "tp": given.tp, "seed": given.seed, **finding}
            print(json.dumps(line | context), flush=True)
            passed &= finding["passed"]
    return 0 if passed else 1


def options(device: str, dtype: str) -> dict[str, Any]:
    """Of engines whose ids are compared; attention in float32 is Triton's on a GPU."""
    backend = "triton" if device == "cuda" and dtype == "float32" else "auto"
    num_pages = 2048 if device == "cuda" else 256
    return {"device": device, "dtype": dtype, "attention_backend": backend, "num_pages": num_pages, "max_running": 32}


def ids(given: argparse.Namespace, folder: Path) -> Iterator[Finding]:
    """Findings of one group size: ids in each type, and in the last one the death of a rank."""
    model: dict[str, Any] = {"model": "demo"}
    if given.model != "demo":
        model = {"model": str(random_model(folder)), "dummy_weights": True}
    prompts = [[random.randrange(5, 1024) for _ in range(random.randint(1, 90))] for _ in range(given.rows)]
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    dtypes = ("float32", "bfloat16") if given.device == "cuda" and given.model == "demo" else ("float32",)
    for dtype in dtypes:
        engine = model | options(given.device, dtype)
        with LLM(**engine) as single:
            want = generate(single, prompts, params)
        started = time.monotonic()
        with LLM(**engine, tp=given.tp, check_ranks=7) as group:
            startup_s = since(started)
            got = generate(group, prompts, params)
            finding: Finding = {"check": "ids", "dtype": dtype, "startup_s": startup_s, **compare(want, got)}
            needed = given.rows if dtype == "float32" else SAME_IN_BF16 * given.rows
            yield {"passed": finding["same_rows"] >= needed, **finding}
            if dtype == dtypes[-1]:
                yield {"check": "death in a call", "dtype": dtype, **kill_a_follower(group)}


def random_model(folder: Path) -> Path:
    """A folder with a tokenizer and no weights."""
    (folder / "config.json").write_text(json.dumps(TWO_KV_HEADS), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_path("demo") / name, folder)
    return folder


def generate(llm: LLM, prompts: list[list[int]] | list[str], params: SamplingParams) -> Ids:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, progress=False)]


def compare(want: Ids, got: Ids) -> dict[str, int]:
    return {"rows": len(want), "same_rows": sum(a == b for a, b in zip(want, got, strict=False))}


def kill_a_follower(llm: LLM) -> Finding:
    """Kill one while rows run; how the caller learns of it."""
    assert llm._engine._followers is not None
    children = llm._engine._followers._children
    rank = random.randint(1, len(children))
    stream = llm.stream(["a", "b", "c", "d"], SamplingParams(max_tokens=1900, ignore_eos=True))
    next(stream)
    os.kill(children[rank - 1].pid, signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in stream:
            pass
        said = ""
    except WorkerError as error:
        said = str(error)
    took_s = since(started)
    llm.close()
    left = [child.pid for child in children if psutil.pid_exists(child.pid)]
    passed = f"rank {rank} was killed by SIGKILL" in said and took_s < DEATH_S and not left
    return {"passed": passed, "killed": rank, "said": said, "seconds": took_s, "left": len(left)}


def groups(given: argparse.Namespace, folder: Path) -> Iterator[Finding]:
    """The finding of a job that two groups share, one of which loses a rank meanwhile."""
    engine = options(given.device, "float32") | {"max_running": 8}
    prompts = [f"What is {random.randrange(1000)} + {random.randrange(1000)}?" for _ in range(given.rows)]
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    with LLM("demo", **engine) as single:
        want = generate(single, prompts, params)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items()]
    with EmbeddedRedis.private() as server, Client(server.url) as client:
        command = ("worker", "--model", "demo", "--tp", given.tp, "--groups", 2, *flags, "--lease-s", LEASE_S)
        started = time.monotonic()
        with Command(*command, "--redis", server.url, TMPDIR=str(folder)) as worker:
            for number in range(2):
                worker.wait_for(f"group {number}: serving", WAIT_S)
            finding: Finding = {"check": "groups", "rows": given.rows, "startup_s": since(started)}
            started = time.monotonic()
            workers: set[str] = set()
            job = client.submit(
                prompts, model="demo", output=folder / "out", params=params, chunk_rows=CHUNK_ROWS, token_ids=True
            )
            wait_for("work of both groups", lambda: is_in_the_middle(job, workers), WAIT_S)
            finding |= kill_a_rank(worker)
            killed = time.monotonic()
            was_under_way = not job.status().state.is_final
            state = job.wait(WAIT_S).state
            finding |= {"state": state.value, "seconds": since(started), "after_death_s": since(killed)}
            table = job.results()
            got = table["output_token_ids"].to_pylist()
            finding |= {"row_indices": len(set(table["row_index"].to_pylist())), **compare(want, got)}
            passed = was_under_way and state is JobState.FINISHED and got == want
            worker.wait_for(f"rank {finding['killed']} was killed by SIGKILL; starting the group again", DEATH_S)
            if not given.leave_early:
                wait_for("the group's return", lambda: worker.stderr.count(": serving jobs") == 3, WAIT_S)
                finding["return_s"] = since(killed)
            yield {"passed": passed, **finding}


def is_in_the_middle(job: JobHandle, workers: set[str]) -> bool:
    """Whether a chunk is done, and both groups have had one. Called often, with the groups seen so far."""
    status = job.status()
    workers.update(lease.worker_id for lease in status.leases)
    return status.chunks_done > 0 and len(workers) == 2


def kill_a_rank(worker: Command) -> Finding:
    """Kill one of any group's."""
    processes = psutil.Process(worker.pid).children(recursive=True)
    ranks = [process for process in processes if any(module in process.cmdline() for module in RANKS)]
    process = random.choice(ranks)
    siblings = [rank for rank in ranks if rank.ppid() == process.ppid()]  # in the order of their start
    process.kill()
    return {"ranks": len(ranks), "killed": siblings.index(process)}


def since(started: float) -> float:
    return round(time.monotonic() - started, 2)


if __name__ == "__main__":
    sys.exit(main())
