"""`submit`: what is queued, what is said, and that nothing is queued when something is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from minisgl_batch.client import Client
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams
from minisgl_jobs.chunks import decode_chunk
from minisgl_jobs.folder_lock import lock_folder
from minisgl_jobs.keys import QueueKeys, queue_name
from minisgl_jobs.model import Priority, Row
from minisgl_jobs.queue import JobQueue
from tests.minisgl_batch.cli.conftest import RunCli, end, write_rows
from tests.minisgl_batch.echo_worker import MODEL, EchoWorker

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEN_FAULTS = [
    ('{"prompt": ""}', "prompt", "is empty"),
    ('{"prompt": 5}', "prompt", "must be a string"),
    ('{"max_tokens": 4}', "prompt", "is missing"),
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens", "must be between 1 and"),
    ('{"prompt": "a", "max_tokens": "16"}', "max_tokens", "must be a whole number"),
    ('{"prompt": "a", "temperature": -1}', "temperature", "must be in [0, 100]"),
    ('{"prompt": "a", "tempreature": 1}', "tempreature", "isn't a known field"),
    ('{"messages": [{"role": "user"}]}', "messages[0].content", "is missing"),
    ('{"prompt": "a"', "-", "isn't valid JSON"),
    ('["a"]', "-", "must be a JSON object"),
    ('{"prompt": "a", "custom_id": "twice"}', "custom_id", '"twice" stands on line 1 already'),
]


def spec_of(client: redis.Redis, job_id: str) -> tuple[object, list[Row]]:
    """A queued job and the rows of its first chunk."""
    keys = QueueKeys(queue_name(MODEL))
    with Client() as api:
        spec = api.job(job_id).status().spec
    return spec, decode_chunk(client.hget(keys.job(job_id, "in"), "0"))  # type: ignore[arg-type]


def test_prints_the_id_and_how_to_go_on(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "my prompts.jsonl", ["a", "b", "c"])
    result = run_cli("submit", source, "--model", MODEL)
    job_id = result.stdout.strip()
    assert job_id.startswith("my-prompts-20")
    output = tmp_path / "outputs" / job_id
    assert f"3 rows queued for echo, to be written to {output}" in result.stderr
    assert f"minisgl-batch tail {job_id}" in result.stderr
    assert "warning: no worker serves echo now" in result.stderr
    end(client, job_id)


def test_no_settings_by_itself_is_refused_by_its_own_name(run_cli: RunCli, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    error = run_cli("submit", source, "--model", MODEL, "--no-settings", code=2).stderr
    assert error.startswith("Error: --no-settings: needs one of --prompt-column, --messages-column and --template")


def test_json(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    result = run_cli("submit", source, "--model", MODEL, "--json", "--job-id", "mine", "--output", "there")
    assert json.loads(result.stdout) == {
        "job_id": "mine",
        "model": MODEL,
        "num_rows": 1,
        "output": str(tmp_path / "there"),
        "waiting": "no worker for echo",
    }
    end(client, "mine")


def test_all_options_arrive(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"chat": CHAT, "text": "a"}] * 3)
    options = "--max-tokens 5 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --n 2 --stop x --stop y --ignore-eos"
    options += " --stop-token-ids 4,5 --include-stop-str-in-output --min-tokens 2 --bad-words x --bad-words y"
    options += " --presence-penalty 1 --frequency-penalty -0.5 --repetition-penalty 1.1 --logit-bias 7:-100,5:2.5"
    options += " --logprobs 2 --prompt-logprobs 0 --truncate left"
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    options += f' --tools {tmp_path}/tools.json --chat-template-kwargs {{"a":1}} --continue-final-message'
    options += " --split-reasoning --stop-in-reasoning --row-timeout 60 --repetition-guard 64"
    options += " --seed 9 --limit 2 --priority high --chunk-rows 1 --token-ids --on-error record"
    options += " --messages-column chat --keep-columns text"
    job_id = run_cli("submit", source, "--model", MODEL, *options.split()).stdout.strip()
    spec, rows = spec_of(client, job_id)
    params = SamplingParams(
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        n=2,
        stop=("x", "y"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        include_stop_str_in_output=True,
        min_tokens=2,
        bad_words=("x", "y"),
        presence_penalty=1.0,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={5: 2.5, 7: -100.0},
        logprobs=2,
        prompt_logprobs=0,
        truncate="left",
        tools=({"name": "f"},),
        chat_template_kwargs={"a": 1},
        continue_final_message=True,
        split_reasoning=True,
        stop_in_reasoning=True,
        row_timeout=60.0,
        repetition_guard=64,
    )
    assert (spec.params, spec.seed, spec.num_rows, spec.chunk_rows) == (params, 9, 2, 1)  # type: ignore[attr-defined]
    assert (spec.priority, spec.token_ids) == (Priority.HIGH, True)  # type: ignore[attr-defined]
    assert rows == [Row(row_index=0, messages=CHAT)]
    end(client, job_id)


def test_prompts_as_they_are_by_a_template(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"text": "a"}])
    job_id = run_cli("submit", source, "--model", MODEL, "--template", "Say {text}.", "--no-chat").stdout.strip()
    assert spec_of(client, job_id)[1] == [Row(row_index=0, prompt="Say a.")]
    end(client, job_id)


@pytest.mark.parametrize(
    "option", [("--tools", "tools.json"), ("--continue-final-message",), ("--chat-template-kwargs", '{"a": 1}')]
)
def test_options_of_chats_need_messages(run_cli: RunCli, tmp_path: Path, option: tuple[str, ...]) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    good = {"messages": CHAT}
    source = write_rows(tmp_path / "in.jsonl", [good, {"prompt": "a"}, good, {"prompt_token_ids": [1]}])
    result = run_cli("submit", source, "--model", MODEL, *option, code=2)
    assert "2 of 4 rows can't be used" in result.stderr
    field = option[0].removeprefix("--").replace("-", "_")
    assert f"{field}  is for messages, and the row has none" in result.stderr
    chats = "" if field == "continue_final_message" else "make prompts chats with --chat, "
    assert f"give messages, {chats}or leave out {option[0]}" in result.stderr


def test_a_row_goes_on_with_its_own_assistant_alone(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"messages": CHAT}, {"messages": CHAT[:1]}])
    result = run_cli("submit", source, "--model", MODEL, "--continue-final-message", code=2)
    assert "1 of 2 rows can't be used" in result.stderr
    assert "needs a last message of assistant, not of user" in result.stderr
    others = [{"messages": CHAT[:1]}, {"prompt": "a"}]
    write_rows(source, [{"messages": CHAT}, *({**row, "continue_final_message": False} for row in others)])
    end(client, run_cli("submit", source, "--model", MODEL, "--continue-final-message").stdout.strip())


def test_a_schema_comes_from_a_file(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    (tmp_path / "schema.json").write_text('{"type": "boolean"}')
    schema = ["--json-schema", tmp_path / "schema.json"]
    more = ("--structured-outputs", '{"disable_any_whitespace": true}')
    job_id = run_cli("submit", source, "--model", MODEL, *schema, *more).stdout.strip()
    spec, _ = spec_of(client, job_id)
    given = StructuredOutputsParams(json={"type": "boolean"}, disable_any_whitespace=True)
    assert spec.params == SamplingParams(structured_outputs=given)  # type: ignore[attr-defined]
    end(client, job_id)
    refused = run_cli("submit", source, "--model", MODEL, *schema, "--structured-outputs", '{"regex": "a"}', code=2)
    assert "--json-schema: stands beside --structured-outputs" in refused.stderr
    refused = run_cli("submit", source, "--model", MODEL, *schema, "--choices", "a,b", code=2)
    assert "--json-schema: says nothing beside choices" in refused.stderr
    assert "warning: --choices 'a,b' is one text" in refused.stderr
    (tmp_path / "schema.json").write_text('{"type": "objekt"}')
    refused = run_cli("submit", source, "--model", MODEL, *schema, code=2)
    assert "--json-schema: Invalid type: objekt" in refused.stderr
    refused = run_cli("submit", source, "--model", MODEL, "--structured-outputs", '{"regex": "("}', code=2)
    assert "--structured-outputs: " in refused.stderr
    (tmp_path / "schema.json").write_text("null")
    refused = run_cli("submit", source, "--model", MODEL, *schema, code=2)
    assert "schema.json holds no JSON schema" in refused.stderr


def test_no_options_set_nothing(client: redis.Redis, submit: Callable[..., str]) -> None:
    job_id = submit(["a"])
    spec, rows = spec_of(client, job_id)
    assert spec.params == SamplingParams()  # type: ignore[attr-defined]
    assert rows == [Row(row_index=0, prompt="a")]
    end(client, job_id)


def test_standard_input_and_a_system_message(run_cli: RunCli, client: redis.Redis) -> None:
    arguments = ["--model", MODEL, "--system", "Be kind."]
    result = run_cli("submit", "-", *arguments, stdin='{"prompt": "안녕"}\r\n\n{"prompt": "b"}')
    job_id = result.stdout.strip()
    assert job_id.startswith("stdin-")
    spec, rows = spec_of(client, job_id)
    assert spec.system == "Be kind."  # type: ignore[attr-defined]
    assert [row.messages for row in rows] == [[{"role": "user", "content": text}] for text in ("안녕", "b")]
    end(client, job_id)


def test_a_table_of_all_kinds_of_faults(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text("\n".join(['{"prompt": "a", "custom_id": "twice"}', *(line for line, _, _ in TEN_FAULTS)]))
    result = run_cli("submit", source, "--model", MODEL, code=2)
    lines = result.stderr.splitlines()
    assert lines[0] == f"Error: {source}: 11 of 12 rows can't be used"
    assert lines[1].split() == ["line", "field", "problem", "what", "to", "do"]
    for number, (shown, (_, field, problem)) in enumerate(zip(lines[2:], TEN_FAULTS, strict=True), 2):
        assert shown.split()[:2] == [str(number), field]
        assert problem in shown
    assert result.stdout == ""
    assert list(client.scan_iter()) == []
    assert os.listdir(tmp_path) == ["bad.jsonl"]


def test_all_faults_can_be_listed(run_cli: RunCli, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [""] * 25)
    shown = run_cli("submit", source, "--model", MODEL, code=2).stderr
    assert shown.count("is empty") == 20
    assert shown.endswith("... and 5 more; --max-faults lists them\n")
    assert run_cli("submit", source, "--model", MODEL, "--max-faults", 99, code=2).stderr.count("is empty") == 25


def test_faults_are_recorded(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text('{"prompt": "a"}\n{\n{"prompt": "b", "n": 0}\n')
    with EchoWorker(client):
        arguments = ["submit", source, "--model", MODEL, "--on-error", "record", "--wait"]
        result = run_cli(*arguments, code=1)
    assert "2 of 3 rows can't be used and become error rows:" in result.stderr
    assert "partial: 1 row ok, 2 failed" in result.stderr
    assert "failed: row_index 1: invalid_request: line 2: isn't valid JSON" in result.stderr
    assert '"a" -> "echo a"' in result.stderr


def test_wait_shows_what_came_of_it(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a", {"messages": [{"role": "user", "content": "x\ny"}]}])
    with EchoWorker(client):
        result = run_cli("submit", source, "--model", MODEL, "--wait")
    assert "finished: 2 rows ok, 0 failed in" in result.stderr
    assert "50% of prompt tokens from the cache" in result.stderr
    assert '  "a" -> "echo a"\n  "x\\ny" -> "echo x\\ny"\n' in result.stderr
    assert len(result.stdout.splitlines()) == 1
    with EchoWorker(client):
        result = run_cli("submit", write_rows(source, ["a", "fail"]), "--model", MODEL, "--wait", "--json", code=1)
    record = json.loads(result.stdout)
    assert (record["state"], record["rows_ok"], record["rows_error"]) == ("partial", 1, 1)


def test_a_dataset_is_not_overwritten_by_accident(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    with EchoWorker(client):
        job_id = submit(["a"], "--wait")
        source = write_rows(tmp_path / "in.jsonl", ["b"])
        result = run_cli("submit", source, "--model", MODEL, "-o", tmp_path / "out", code=2)
        assert (
            f"holds the output of job {job_id}, which is another: its rows differ, first among row_index 0 to 0"
            in result.stderr
        )
        assert "choose another folder, or overwrite it with --overwrite" in result.stderr
        submit(["b"], "--wait", "--overwrite")


def test_names_that_can_not_be_used(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    result = run_cli("submit", source, "--model", MODEL, "-o", source, code=2)
    assert f"--output: {source} is a file: name a folder" in result.stderr
    run_cli("submit", source, "--model", MODEL, "--job-id", "mine")
    other = write_rows(tmp_path / "other.jsonl", ["b"])
    taken = run_cli("submit", other, "--model", MODEL, "--job-id", "mine", "-o", "new", code=2)
    assert "job mine exists and is another one" in taken.stderr
    end(client, "mine")


def test_models_that_openai_lines_name(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    body = {"model": "gpt-x", "prompt": "a"}
    source = write_rows(tmp_path / "in.jsonl", [{"custom_id": "1", "url": "/v1/completions", "body": body}])
    result = run_cli("submit", source, "--model", MODEL)
    assert "the input names gpt-x; the job runs on echo" in result.stderr
    end(client, result.stdout.strip())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", MODEL, "--max-tokens", "0"], "--max-tokens: must be between 1 and"),
        (["--model", MODEL, "--template", "no field"], "--template: "),
        (["--model", MODEL, "--job-id", "a b"], "--job-id: must be up to 128 letters"),
        (["--model", MODEL, "--output", "nope://x"], "--output: nope://x can't be used"),
        (["--model", MODEL, "--system", "x", "--no-chat"], "--system: needs chat messages"),
        (["--model", ""], "--model: is empty"),
        ([], "Missing option '--model'"),
    ],
)
def test_bad_usage(run_cli: RunCli, tmp_path: Path, arguments: list[str], message: str) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    assert message in run_cli("submit", source, *arguments, code=2).stderr


def test_inputs_that_are_not_there(run_cli: RunCli) -> None:
    result = run_cli("submit", "nothing.jsonl", "--model", MODEL, code=2)
    assert "nothing.jsonl: there is no such file" in result.stderr


def test_a_table_is_left_where_it_is_and_its_columns_come_out(
    run_cli: RunCli, client: redis.Redis, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"id": [7, 8, 9], "question": ["a", "b", "c"], "n": [1, 2, 3]}), tmp_path / "in.parquet")
    columns = ("--prompt-column", "question", "--keep-columns", "id,question", "--no-settings")
    with EchoWorker(client):
        arguments = ("submit", tmp_path / "in.parquet", "--model", MODEL, "-o", tmp_path / "out", *columns)
        job_id = run_cli(*arguments, "--by-reference", "--wait").stdout.strip()
        again = run_cli(*arguments, "--by-value", "--wait")
    status = JobQueue(client).status(job_id)
    assert status.spec.reference is not None
    assert (status.rows_ok, again.stdout.strip()) == (3, job_id)
    assert f"job {job_id} has nothing left to do: 3 of 3 rows are in {tmp_path / 'out'}" in again.stderr
    assert "queued" not in again.stderr


@pytest.mark.parametrize("transport", ["--by-reference", "--by-value"])
def test_columns_of_csv_and_json_lines_come_out_with_types(
    run_cli: RunCli, client: redis.Redis, tmp_path: Path, transport: str
) -> None:
    (tmp_path / "in.csv").write_text("prompt,id,score\na,1,0.5\nb,,2\n")
    write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "label": "2", "tags": ["x"]}, {"prompt": "b", "label": "3"}])
    for name, types, last in (
        ("csv", {"id": "int64", "score": "double"}, [None, 2.0]),
        ("jsonl", {"label": "string", "tags": "list<item: string>"}, ["3", None]),
    ):
        out = tmp_path / name
        columns = ("--keep-columns", ",".join(types), "--chunk-rows", 1, transport, "--wait")
        arguments = ("submit", tmp_path / f"in.{name}", "--model", MODEL, "-o", out, *columns)
        with EchoWorker(client):
            run_cli(*arguments)
            assert "nothing left to do" in run_cli(*arguments).stderr
        table = pq.read_table(out).select(list(types))
        assert {field.name: str(field.type).replace("element", "item") for field in table.schema} == types
        assert list(table.to_pylist()[1].values()) == last
        assert json.loads((out / "_manifest.json").read_bytes())["kept_columns"] == types


def test_a_job_that_is_under_way_is_not_queued_anew(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    job_id = submit(["a"])
    again = run_cli("submit", tmp_path / "in.jsonl", "--model", MODEL, "-o", tmp_path / "out")
    assert again.stdout.strip() == job_id
    assert f"job {job_id} is queued already, for {MODEL}" in again.stderr
    assert "row queued" not in again.stderr
    end(client, job_id)


def test_nothing_is_submitted_to_the_folder_of_a_run(run_cli: RunCli, client: redis.Redis, tmp_path: Path) -> None:
    source, folder = write_rows(tmp_path / "in.jsonl", ["a"]), tmp_path / "out"
    folder.mkdir()
    (folder / "_JOB").write_text("rows-1")
    with lock_folder(folder, alone=True):
        refused = run_cli("submit", source, "--model", MODEL, "-o", folder, "--overwrite", code=2)
    assert f"another run (job rows-1) writes to {folder}: wait for its end, or use another folder" in refused.stderr
    assert os.listdir(folder) == ["_JOB"]
    assert list(client.scan_iter()) == []


def test_a_job_that_may_not_go_on_is_not_said_to(
    run_cli: RunCli, client: redis.Redis, submit: Callable[..., str], tmp_path: Path
) -> None:
    job_id, folder = submit(["a"]), tmp_path / "out"
    with lock_folder(folder, alone=True):
        refused = run_cli("submit", tmp_path / "in.jsonl", "--model", MODEL, "-o", folder, code=2)
    message = f"another run (job {job_id}) writes to {folder}: wait for its end, or use another folder"
    assert refused.stderr == f"Error: {message}\n"
    end(client, job_id)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (["a"], ("--system", "x", "--no-chat"), "--system: needs chat messages: leave out --no-chat, or --system"),
        (["a"], ("--keep-columns", "c"), "no row has 'c', which --keep-columns names"),
        (
            ["a"],
            ("--truncate", "left"),
            "--truncate: needs max_tokens, to know how much room to make where ",
        ),
        ([{"text": "a"}], (), "Rename it, or say --prompt-column text (or --template)"),
    ],
)
def test_errors_name_options_as_they_are_written_here(
    run_cli: RunCli, tmp_path: Path, rows: list[object], options: tuple[str, ...], message: str
) -> None:
    """Our own checks name arguments, which are those of programs, too."""
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert message in run_cli("submit", source, "--model", MODEL, *options, code=2).stderr
