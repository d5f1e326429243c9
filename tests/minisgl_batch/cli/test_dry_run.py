"""`submit --dry-run`: counts and an estimate, and nothing is queued."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import redis

from minisgl_batch import engine_extra
from minisgl_batch.hub import model_path
from minisgl_batch.tokenizer import ModelTokenizer
from minisgl_jobs.leases import ChunkQueue
from minisgl_jobs.status import WorkerInfo
from tests.minisgl_batch.cli.conftest import RunCli, write_rows
from tests.minisgl_batch.hub_cache import HUB_ID, MAIN, OLD
from tests.processes import run_python


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(model_path("demo"))


def test_tokens_are_those_of_a_worker(
    run_cli: RunCli, client: redis.Redis, tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    prompts = ["one", "three more words", "many " * 100, "far too many " * tokenizer.max_len]
    source = write_rows(tmp_path / "in.jsonl", [*prompts, {"prompt_token_ids": [1, 2, 3], "max_tokens": 2, "n": 3}, ""])
    arguments = ["submit", source, "--model", "demo", "--max-tokens", 5, "--on-error", "record", "--dry-run"]
    lengths = [len(tokenizer.encode_prompt(prompt)) for prompt in prompts[:3]] + [3]
    record = json.loads(run_cli(*arguments, "--json", code=1).stdout)
    assert record["prompt_tokens"] == sum(lengths)
    assert record["longest_prompt_tokens"] == max(lengths)
    assert record["max_output_tokens"] == 3 * 5 + 3 * 2
    assert (record["num_rows"], record["num_chunks"], record["num_faults"]) == (6, 1, 1)
    assert (record["num_refused"], record["num_too_long"]) == (1, 1)
    assert record["context"] == tokenizer.max_len
    (refused,) = record["refused"]
    assert (refused["row_index"], refused["error_type"]) == (3, "prompt_too_long")

    result = run_cli(*arguments, code=1)
    shown = result.stdout
    assert "rows           6 in 1 chunk, " in shown
    assert f"prompt tokens  {sum(lengths):,} ({sum(lengths) / 4:,.0f} a row, {min(lengths)} to {max(lengths)})" in shown
    assert "output tokens  at most 21\n" in shown
    assert f"refused        1 row can't be served: too long for the context of {tokenizer.max_len:,} tokens\n" in shown
    assert "row_index 3: the prompt has" in result.stderr
    rows_by_length = {}
    for line in shown.splitlines():
        if line.endswith("#"):
            *span, number, _ = line.replace(",", "").split()
            rows_by_length[int(span[0]), int(span[-1])] = int(number)
    expected = {span: sum(span[0] <= length <= span[1] for length in lengths) for span in rows_by_length}
    assert rows_by_length == expected
    assert sum(rows_by_length.values()) == 4

    cut = json.loads(run_cli(*arguments, "--truncate", "left", "--json", code=1).stdout)
    assert (cut["num_refused"], cut["longest_prompt_tokens"]) == (0, tokenizer.max_len - 5)

    assert list(client.scan_iter()) == []
    assert os.listdir(tmp_path) == ["in.jsonl"]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NO_TOOLS = "warning: the chat template of {} has no tools in it: the model won't see those given\n"


@pytest.mark.usefixtures("client")
def test_tools_that_the_template_drops_are_told(run_cli: RunCli, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    with_tools = write_rows(tmp_path / "with.jsonl", [chat, {**chat, "tools": TOOLS}])
    without = write_rows(tmp_path / "without.jsonl", [chat, {**chat, "tools": []}])
    for arguments, expected in (
        ([with_tools, "--dry-run"], True),
        ([without, "--dry-run"], False),
        ([without, "--dry-run", "--tools", "tools.json"], True),
        ([with_tools], True),
        ([without], False),
    ):
        result = run_cli("submit", *arguments, "--model", "demo")
        assert (NO_TOOLS.format("demo") in result.stderr) == expected
        assert result.stderr.count("has no tools") == expected
        if "--dry-run" not in arguments:
            run_cli("cancel", result.stdout.strip())


def test_tools_that_the_workers_template_drops_are_told_of_hub_ids(
    run_cli: RunCli, client: redis.Redis, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    source = write_rows(tmp_path / "in.jsonl", [chat])
    for drops_tools in (True, False):
        ChunkQueue(client, HUB_ID, "w1").heartbeat(WorkerInfo("w1", HUB_ID, drops_tools=drops_tools))
        result = run_cli("submit", source, "--model", HUB_ID)
        assert (NO_TOOLS.format(HUB_ID) in result.stderr) == drops_tools
        run_cli("cancel", result.stdout.strip())


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("files", "is_told"),
    [
        ({}, False),
        ({"chat_template.jinja": "{{ messages }}{{ my_tools }}"}, True),
        ({"chat_template.jinja": "{% if tools %}"}, False),
        ({"chat_template.jinja": "{{ messages }}", "additional_chat_templates/tool_use.jinja": "{{ tools }}"}, False),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, True),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "tool_use", "template": "{{ tools }}"}]}'}, False),
        ({"tokenizer_config.json": "[", "chat_template.json": '{"chat_template": "{{ messages }}"}'}, True),
        ({"tokenizer_config.json": "[]"}, False),
    ],
)
def test_templates_are_found_where_models_have_them(
    run_cli: RunCli, tmp_path: Path, files: dict[str, str], is_told: bool
) -> None:
    for name, text in files.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    source = write_rows(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}])
    result = run_cli("submit", source, "--model", "./model")
    assert (NO_TOOLS.format("./model") in result.stderr) == is_told
    run_cli("cancel", result.stdout.strip())


def test_how_many_are_too_long_and_rows_of_one_token(
    run_cli: RunCli, tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    rows = [{"prompt_token_ids": ids} for ids in ([10**6], [1] * 3 * tokenizer.max_len, [1], [2])]
    source = write_rows(tmp_path / "in.jsonl", rows)
    shown = run_cli("submit", source, "--model", "demo", "--dry-run", code=1).stdout
    assert "refused        2 rows can't be served: 1 of them too long for the context of " in shown
    assert "\nprompt tokens  2 (1 a row)\n" in shown
    assert re.search(r"\n +1 +2  #+\n", shown), shown
    source = write_rows(tmp_path / "in.jsonl", rows[:1])
    shown = run_cli("submit", source, "--model", "demo", "--dry-run", code=1).stdout
    assert "refused  1 row can't be served\n" in shown


def test_every_row_that_can_not_be_served_is_listed(run_cli: RunCli, tmp_path: Path) -> None:
    rows = [{"prompt_token_ids": [10**6 + i]} for i in range(25)]
    arguments = ["submit", write_rows(tmp_path / "in.jsonl", rows), "--model", "demo", "--dry-run"]
    shown = run_cli(*arguments, code=1).stderr
    assert (shown.count("row_index "), "... and 5 more; --max-faults lists them" in shown) == (20, True)
    assert run_cli(*arguments, "--max-faults", 25, code=1).stderr.count("row_index ") == 25
    good = write_rows(tmp_path / "good.jsonl", ["a", {"prompt": "a", "structured_outputs": {"regex": "a+"}}])
    run_cli("submit", good, "--model", "demo", "--dry-run")
    bad = write_rows(tmp_path / "bad.jsonl", ["a", {"prompt": "a", "structured_outputs": {"regex": "(a"}}])
    assert "unclosed group" in run_cli("submit", bad, "--model", "demo", "--dry-run", code=1).stderr
    deep = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)) + '\nr3000: "a"'
    write_rows(tmp_path / "bad.jsonl", ["a", {"prompt": "a", "structured_outputs": {"grammar": deep}}])
    assert "too complex" in run_cli("submit", bad, "--model", "demo", "--dry-run", code=1).stderr


@pytest.mark.usefixtures("cache")
def test_tokens_are_those_of_the_revision_that_workers_run(
    run_cli: RunCli, client: redis.Redis, tmp_path: Path, tokenizer: ModelTokenizer
) -> None:
    def found(model: str) -> tuple[int, str]:
        arguments = ("submit", source, "--model", model, "--dry-run")
        record, shown = json.loads(run_cli(*arguments, "--json").stdout), run_cli(*arguments).stdout
        return record["context"], next(line for line in shown.splitlines() if line.startswith("tokenizer"))

    def serve(model: str, worker_id: str, commit: str) -> None:
        worker = ChunkQueue(client, model, worker_id)
        worker.heartbeat(WorkerInfo(worker_id, model, description={"revision": commit}))

    source = write_rows(tmp_path / "in.jsonl", ["a"])
    assert found(HUB_ID) == (tokenizer.max_len, f"tokenizer      of revision {MAIN}")
    serve(HUB_ID, "w1", OLD)
    assert found(HUB_ID) == (128, f"tokenizer      of revision {OLD}")
    serve(f"{HUB_ID}@main", "w2", OLD)  # which has moved
    assert found(f"{HUB_ID}@main") == (128, f"tokenizer      of revision {OLD}")
    serve(f"{HUB_ID}@v1", "w3", "c" * 40)  # of another model, which is served under this name
    assert found(f"{HUB_ID}@v1") == (128, f"tokenizer      of revision {OLD}; its workers run {'c' * 40}")
    serve(HUB_ID, "w4", MAIN)
    assert found(HUB_ID) == (tokenizer.max_len, f"tokenizer      of revision {MAIN}; its workers run {MAIN}, {OLD}")


def test_tokens_are_counted_without_torch(run_cli: RunCli, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    program = f"""
import sys
from minisgl_batch.cli.main import cli
cli(["submit", {str(source)!r}, "--model", "demo", "--dry-run", "--json"], standalone_mode=False)
print("transformers" in sys.modules, sys.modules["torch"])
"""
    record, loaded = run_python(program).splitlines()
    assert (
        json.loads(record)["prompt_tokens"]
        == json.loads(run_cli("submit", source, "--model", "demo", "--dry-run", "--json").stdout)["prompt_tokens"]
    )
    assert loaded == "True None"


def test_without_the_engine_rows_are_counted(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_extra, "ENGINE_MODULES", ("no_such_engine",))
    source = write_rows(tmp_path / "in.jsonl", ["a", "b"])
    result = run_cli("submit", source, "--model", "some/model", "--dry-run")
    assert result.stdout.startswith("rows  2 in 1 chunk, ")
    assert "tokens aren't counted without no_such_engine: pip install 'minisgl-batch[engine]'" in result.stderr


def test_faults_and_models_that_are_not_there(run_cli: RunCli, tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", ["a"])
    bad = write_rows(tmp_path / "bad.jsonl", ["", "b"])
    assert "1 of 2 rows can't be used" in run_cli("submit", bad, "--model", "demo", "--dry-run", code=2).stderr
    result = run_cli("submit", good, "--model", "./nothing", "--dry-run", code=2)
    assert "Error: no model folder at nothing" in result.stderr
    result = run_cli("submit", good, "--model", "DEMO", "--dry-run", code=2)
    assert "there is no model 'DEMO'; did you mean \"demo\"?" in result.stderr
