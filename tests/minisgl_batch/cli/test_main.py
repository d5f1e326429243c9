"""The command as a whole: help, lazy loading, and how errors become messages and exit codes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import redis
from click.testing import CliRunner

from minisgl_batch import __version__
from minisgl_batch.cli.main import COMMANDS, cli, main
from minisgl_batch.client import Client
from minisgl_batch.errors import InvalidParameterError, ModelError, ModelUnavailableError, UsageError
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.minisgl_batch.cli.conftest import RunCli, end, write_rows
from tests.minisgl_batch.echo_worker import MODEL
from tests.processes import run_python


def test_help_lists_all_commands_and_the_exit_codes() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.output
    assert "130  interrupted" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_the_list_says(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert inspect.getdoc(command.callback).splitlines()[0] == COMMANDS[name]  # type: ignore[union-attr]
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {name} ")


def test_help_loads_nothing_slow() -> None:
    program = "; ".join(
        [
            "import sys",
            "from minisgl_batch.cli.main import cli",
            "cli(['--help'], standalone_mode=False)",
            "print(sys.modules.keys() & {'torch', 'transformers', 'numpy', 'pyarrow', 'redis', 'rich'})",
        ]
    )
    assert run_python(program).splitlines()[-1] == "set()"


def test_commands_load_no_torch() -> None:
    modules = ", ".join(f"minisgl_batch.cli.{name}" for name in COMMANDS)
    assert run_python(f"import sys, {modules}; print('torch' in sys.modules)") == "False\n"


# A module that is None there can't be found.
CLIENT_ALONE = """
import sys
from minisgl_batch.cli.main import COMMANDS, cli
from minisgl_batch.engine_extra import ENGINE_MODULES
sys.modules.update(dict.fromkeys(ENGINE_MODULES))
"""


@pytest.mark.usefixtures("run_cli")
def test_the_client_needs_no_extra(client: redis.Redis, redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ["a", "b"]), tmp_path / "out"
    options = ["submit", str(source), "--model", MODEL, "--redis", redis_server.url, "-o", str(output)]
    program = f"""
for name in COMMANDS:
    cli([name, "--help"], standalone_mode=False)
cli([*{options}, "--dry-run"], standalone_mode=False)
cli([*{options}, "--structured-outputs", '{{"regex": "a+"}}'], standalone_mode=False)
"""
    said = run_python(CLIENT_ALONE + program).splitlines()
    assert sum(line.startswith("Usage: ") for line in said) == len(COMMANDS)
    end(client, said[-1])


@pytest.mark.parametrize("command", ["run no.jsonl --model demo", "worker --model demo", "bench U --model demo"])
def test_what_needs_the_engine_says_so(command: str) -> None:
    program = f"""
try:
    cli({command.split()}, prog_name="minisgl-batch")
except SystemExit as end:
    print(end.code)
try:
    from minisgl_batch import LLM
except UsageError as error:
    print(error)
"""
    said = run_python(f"{CLIENT_ALONE}from minisgl_batch.errors import UsageError\nsys.stderr = sys.stdout\n{program}")
    missing = "the engine isn't installed (torch, "
    first, code, second = said.splitlines()
    assert code == "2"
    assert first.startswith(f"Error: {missing}")
    assert second.startswith(missing)
    assert second.endswith("pip install 'minisgl-batch[engine]'")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("run", "--tensor-parallel-size", "1"), "did you mean --tp?"),
        (("submit", "--quantization", "fp8"), "it is an option of run, worker, bench"),
        (("jobs", "--colour"), "No such option"),
    ],
)
def test_options_that_there_are_not(run_cli: RunCli, arguments: tuple[str, ...], hint: str) -> None:
    assert hint in run_cli(*arguments, code=2).stderr


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "minisgl_batch", "--version"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert shown == f"minisgl-batch, version {__version__}\n"


def test_version_and_unknown_commands() -> None:
    assert __version__ in CliRunner().invoke(cli, ["--version"]).output
    result = CliRunner().invoke(cli, ["sumbit"])
    assert result.exit_code == 2
    assert "No such command 'sumbit'" in result.output


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelError("no such model"), 2, "Error: no such model\n"),
        (ModelUnavailableError("no memory"), 1, "Error: no memory\n"),
        (UsageError("they contradict"), 2, "Error: they contradict\n"),
        (InvalidParameterError("as_json", "is wrong"), 2, "Error: --json: is wrong\n"),
        (InvalidParameterError("elsewhere", "is wrong"), 2, "Error: elsewhere: is wrong\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_messages(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Client, "overview", fail)
    result = run_cli("jobs", code=code)
    assert result.stderr == message
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--colour",), "No such option"),
        (("sumbit",), "No such command 'sumbit'"),
        (("run", "in.jsonl"), "Missing option '--model'"),
        (
            ("run", "in.jsonl", "--model", "demo", "--dtype", "fp16"),
            "Invalid value for '--dtype': 'fp16' is not one of",
        ),
        (("submit", "in.jsonl", "--model", "demo", "--json-schema", "nope.json"), "can't read nope.json: No such file"),
        (("submit", "in.jsonl", "--model", "demo", "--logit-bias", '{"92": 5}'), "isn't token ids with numbers"),
        (("submit", "in.jsonl", "--model", "demo", "--presence-penalty", "3"), "--presence-penalty: must be"),
        (("cancel", "a", "b"), "Got unexpected extra argument (b)"),
        (("jobs", "--limit"), "Option '--limit' requires an argument"),
        (("jobs", "--\x1b[31m"), "No such option"),
    ],
)
def test_usage_errors_are_one_line(run_cli: RunCli, arguments: tuple[str, ...], message: str) -> None:
    (line,) = run_cli(*arguments, code=2).stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line
    assert "\x1b" not in line


def test_no_command_shows_the_help(run_cli: RunCli) -> None:
    assert "Usage: cli [OPTIONS] COMMAND" in run_cli(code=2).stderr


def test_a_defect_is_not_hidden(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Client, "overview", fail)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_cli("jobs")


def test_a_redis_that_is_not_there(tmp_path: object) -> None:
    url = f"unix://user:secret@{tmp_path}/nothing.sock"
    result = CliRunner().invoke(cli, ["jobs", "--redis", url])
    assert result.exit_code == 4
    assert "can't be reached" in result.stderr
    assert "secret" not in result.output


def test_the_console_script_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["minisgl-batch", "cancel"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
