"""Options on their way into configs, from flags and from the environment."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from minisgl_batch import engine_extra
from minisgl_batch.attention.registry import _BACKENDS
from minisgl_batch.cli import worker as worker_command
from minisgl_batch.cli.main import cli
from minisgl_batch.cli.sections import SectionOption
from minisgl_batch.config import EngineConfig
from minisgl_batch.engine.memory import CPU_MEMORY_RATIO, GPU_MEMORY_RATIO
from minisgl_batch.engine.options import resolve
from minisgl_batch.models.config import load_model_config
from minisgl_workers.options import Node, WorkerOptions

URL = "unix:///nowhere.sock"
VALUES: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 100,
    "max_running": 7,
    "max_prefill_tokens": 64,
    "max_seq_len": 512,
    "memory_ratio": 0.25,
    "dtype": "float32",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "attention_backend": "torch,torch",
    "cuda_graph_max_bs": 32,
    "cache": "naive",
    "device": "cpu",
    "tp": 4,
    "check_ranks": 3,
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerOptions]:
    """The options of workers that would have been run."""
    options: list[WorkerOptions] = []
    monkeypatch.setattr("minisgl_workers.group.run_worker", lambda given, _: options.append(given))
    monkeypatch.setattr(worker_command, "setup_logging", lambda _: None)
    return options


def start(*args: str, env: dict[str, str] | None = None) -> None:
    result = CliRunner().invoke(cli, ["worker", "--model", "m", "--redis", URL, *args], env=env)
    assert result.exit_code == 0, result.output


def test_defaults_are_those_of_the_config(started: list[WorkerOptions]) -> None:
    start()
    assert started == [WorkerOptions(engine=EngineConfig(model="m"), redis_url=URL)]


def test_every_engine_option_as_flag_and_in_the_environment(started: list[WorkerOptions]) -> None:
    flags = [arg for name, value in VALUES.items() for arg in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--overlap", "--mixed", "--no-share-prefixes", "--batch-invariant", "--no-pynccl", "--dummy-weights"]
    start(*flags, "--served-model-name", "x", "--revision", "v1", "--drain-s", "3", "--input-s", "7")
    env = {f"MINISGL_{name.upper()}": str(value) for name, value in VALUES.items()}
    switches = {
        "OVERLAP": "1",
        "MIXED": "1",
        "SHARE_PREFIXES": "0",
        "BATCH_INVARIANT": "1",
        "PYNCCL": "0",
        "DUMMY_WEIGHTS": "true",
        "SERVED_MODEL_NAME": "x",
        "REVISION": "v1",
    }
    start(env=env | {f"MINISGL_{name}": value for name, value in switches.items()})
    given = {
        "revision": "v1",
        "overlap": True,
        "mixed": True,
        "share_prefixes": False,
        "batch_invariant": True,
        "pynccl": False,
        "dummy_weights": True,
    }
    engine = EngineConfig(model="m", **given, **VALUES)
    tested = {"model", *given, *VALUES}
    assert {field.name for field in fields(EngineConfig)} == tested
    by_flag, by_env = started
    assert by_flag == WorkerOptions(engine=engine, redis_url=URL, served_model_name="x", drain_s=3.0, input_s=7.0)
    assert by_env == WorkerOptions(engine=engine, redis_url=URL, served_model_name="x")


def test_no_overlap(started: list[WorkerOptions]) -> None:
    start("--no-overlap")
    start(env={"MINISGL_OVERLAP": "0"})
    assert [options.engine.overlap for options in started] == [False, False]


def test_help_has_sections_and_names_what_can_be_given() -> None:
    shown = CliRunner().invoke(cli, ["run", "--help"]).output
    everyday, sampling, engine = re.split(r"\n(?:Sampling|Engine .*):\n", shown)
    assert "--output" in everyday
    assert "--temperature" in sampling
    assert "--page-size" in engine
    assert not re.search("--(temperature|page-size)", everyday)
    for backend in ("auto", *_BACKENDS):
        assert re.search(rf"\b{backend}\b", engine)


def test_help_tells_every_default_of_the_engine(tmp_path: Path) -> None:
    context = click.Context(cli)
    given = {param.name: param for param in worker_command.worker.params if isinstance(param, SectionOption)}
    shown = {name: (option.get_help_record(context) or ("", ""))[1] for name, option in given.items()}
    assert [
        name for name in shown if not (given[name].is_flag or given[name].hidden or "default: " in shown[name])
    ] == []
    architecture = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8, "num_hidden_layers": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(architecture | sizes))
    used = resolve(EngineConfig(model="some", device="cpu"), load_model_config(tmp_path))
    for name in ("max_running", "max_prefill_tokens"):
        assert f"on a CPU {getattr(used, name)}]" in shown[name]
    for name in ("page_size", "cuda_graph_max_bs"):
        assert f"[default: {getattr(used, name)}]" in shown[name]
    assert f"[default: {GPU_MEMORY_RATIO}; on a CPU {CPU_MEMORY_RATIO}]" in shown["memory_ratio"]
    assert (used.overlap, used.mixed) == ("on a CPU overlap" in shown["overlap"], "on a CPU mixed" in shown["mixed"])


def test_values_of_the_environment_that_are_no_numbers() -> None:
    for name, kind in (("PAGE_SIZE", "whole number"), ("MEMORY_RATIO", "number")):
        result = CliRunner().invoke(cli, ["worker", "--model", "m"], env={f"MINISGL_{name}": "abc"})
        assert result.exit_code == 2
        assert f"Invalid value for the variable MINISGL_{name}: 'abc' is not a valid {kind}." in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--page-size", "0"], "0 is not in the range x>=1"),
        (["--cache", "lru"], "'lru' is not one of 'radix', 'naive'"),
        (["--memory-ratio", "nan"], "'nan' is not a number"),
        (["--memory-ratio", "0"], "--memory-ratio: must be in (0, 1], got 0"),
    ],
)
def test_values_that_are_refused(started: list[WorkerOptions], args: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["worker", "--model", "m", "--redis", URL, *args])
    assert result.exit_code == 2
    assert message in result.output
    assert started == []


@pytest.mark.parametrize("command", ["worker", "run"])
def test_the_engine_must_be_installed(monkeypatch: pytest.MonkeyPatch, command: str, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_extra, "ENGINE_MODULES", ("no_such_engine",))
    source = [str(tmp_path / "in.jsonl")] if command == "run" else []
    result = CliRunner().invoke(cli, [command, *source, "--model", "m", "--redis", URL])
    assert result.exit_code == 2
    assert "(no_such_engine): pip install 'minisgl-batch[engine]'" in result.output


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ("--tp 2 --nodes 2", "rendezvous: several --nodes need --rendezvous HOST:PORT"),
        ("--tp 2 --nodes 2 --rendezvous host", "rendezvous: several --nodes need"),
        ("--tp 3 --nodes 2 --rendezvous h:1", "tp: 3 ranks can't be spread evenly over 2 hosts"),
        ("--tp 2 --nodes 2 --node-rank 2 --rendezvous h:1", "node-rank: must be below --nodes 2"),
        ("--tp 2 --nodes 2 --groups 2 --rendezvous h:1", "groups: a worker that is one of several"),
        ("--node-rank 1", "nodes: --node-rank and --rendezvous are for --nodes 2 and more"),
    ],
)
def test_options_of_hosts_that_do_not_fit_are_named(started: list[WorkerOptions], args: str, problem: str) -> None:
    result = CliRunner().invoke(cli, ["worker", "--model", "m", "--redis", URL, *args.split()])
    assert (result.exit_code, started) == (2, [])
    assert problem.replace("_", "-") in result.output.replace("_", "-")


def test_a_host_of_several_needs_no_redis_but_the_first(started: list[WorkerOptions]) -> None:
    start("--tp", "4", "--nodes", "2", "--rendezvous", "a.b:29500")
    start("--tp", "4", "--nodes", "2", "--rendezvous", "a.b:29500", "--node-rank", "1")
    assert [options.node for options in started] == [Node(2, 0, "a.b:29500"), Node(2, 1, "a.b:29500")]
    assert [options.redis_url for options in started] == [URL, ""]
