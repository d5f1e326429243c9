"""Options that several commands share, and the records that are built from them. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any, TypeVar, get_args

import click

from minisgl_batch.cli.sections import Number, SectionOption, WholeNumber
from minisgl_batch.cli.values import json_file, json_text, schema_file, several, token_biases, token_ids, valid_unicode
from minisgl_batch.config import CacheKind, Dtype, EngineConfig, KVCacheDtype, Quantization
from minisgl_batch.errors import InvalidParameterError, MiniSGLError
from minisgl_batch.sampling_params import MAX_N, SamplingParams, Truncate
from minisgl_jobs.faults import MAX_SHOWN

Function = TypeVar("Function", bound=Callable[..., Any])

ATTENTION_BACKENDS = "auto, torch, triton, fa, fi, trtllm, fa,cuda and fa,fi"
ENGINE = "Engine (or in the environment as MINISGL_..., such as MINISGL_TP)"
SAMPLING = "Sampling"
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "continue_final_message", "split_reasoning", "stop_in_reasoning")
_COUNT: dict[str, Any] = {"type": WholeNumber(min=1), "metavar": "N"}
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
_REAL: dict[str, Any] = {"type": float, "metavar": "X"}
_STRINGS = ("stop", "bad_words", "choices")
_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "truncate",
    "row_timeout",
    "repetition_guard",
    "structured_outputs",
    "tools",
    "chat_template_kwargs",
    *_STRINGS,
    *_FLAGS,
)
_READ_FIELDS = (
    "system",
    "template",
    "prompt_column",
    "messages_column",
    "settings",
    "chat",
    "limit",
    "on_error",
    "max_faults",
)
_SUBMISSION_FIELDS = ("model", "output", "seed", "chunk_rows", "token_ids", "overwrite", "retry_failed", "job_id")
_TRANSPORTS: dict[bool | None, str] = {None: "auto", True: "reference", False: "value"}


def _all(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def job_shell_complete(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Ids of jobs for the shell's completion; none where no Redis answers at once, since nothing may be said there."""
    from minisgl_batch.client import Client

    with suppress(MiniSGLError), Client(ctx.params.get("redis_url")) as client:
        return [job.job_id for job in client.jobs(limit=1000) if job.job_id.startswith(incomplete)]
    return []


redis_option = click.option(
    "--redis",
    "redis_url",
    metavar="URL",
    envvar="MINISGL_REDIS",
    help="redis://, rediss://, unix:// or redis+sentinel:// URL.  [env: MINISGL_REDIS; default: a server of its own]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
job_argument = click.argument("job_id", metavar="JOB", shell_complete=job_shell_complete)
model_option = click.option(
    "--model",
    metavar="MODEL",
    envvar="MINISGL_MODEL",
    required=True,
    callback=valid_unicode,
    help='"demo", a folder in Hugging Face format, or a hub id.',
)


def _engine_option(name: str, help_text: str, **settings: Any) -> Callable[[Function], Function]:
    variable = "MINISGL_" + name.partition("/")[0].removeprefix("--").upper().replace("-", "_")
    return click.option(
        name, cls=SectionOption, section=ENGINE, envvar=variable, help=help_text, show_default=True, **settings
    )


def _sampling_option(name: str, help_text: str, **settings: Any) -> Callable[[Function], Function]:
    return click.option(name, cls=SectionOption, section=SAMPLING, help=help_text, **settings)


engine_options = _all(
    _engine_option(
        "--revision", "Of a hub id: a branch, tag or commit.  [default: main]", metavar="NAME", callback=valid_unicode
    ),
    _engine_option("--device", "Where to compute.", type=click.Choice(["auto", "cpu", "cuda"]), default="auto"),
    _engine_option("--tp", "Ranks that share the model, each with a device of its own.", default=1, **_COUNT),
    _engine_option("--max-seq-len", "Longest prompt + output.  [default: the model's context]", **_COUNT),
    _engine_option("--max-running", "Most requests in one decode step.  [default: 256; on a CPU 64]", **_COUNT),
    _engine_option(
        "--memory-ratio",
        "Share of free memory for weights and KV cache.  [default: 0.9; on a CPU 0.4]",
        type=Number(0, 1),
        metavar="X",
    ),
    _engine_option("--dtype", "Compute type.", type=click.Choice(get_args(Dtype)), default="auto"),
    _engine_option(
        "--quantization",
        "Put weights into FP8 while loading.  [default: as they are]",
        type=click.Choice(get_args(Quantization)),
    ),
    _engine_option(
        "--kv-cache-dtype",
        "How keys and values are kept: auto is the compute type, fp8 half of it.",
        type=click.Choice(get_args(KVCacheDtype)),
        default="auto",
    ),
    _engine_option(
        "--attention-backend",
        f"One of {ATTENTION_BACKENDS} (PREFILL,DECODE).",
        default="auto",
        metavar="NAME",
    ),
    _engine_option("--cache", "Reuse prefixes, or not.", type=click.Choice(get_args(CacheKind)), default="radix"),
    _engine_option("--page-size", "Tokens per KV cache page.  [default: 16]", **_COUNT),
    _engine_option("--num-pages", "KV cache pages.  [default: as memory allows]", **_COUNT),
    _engine_option(
        "--max-prefill-tokens", "Token budget of one prefill step.  [default: 8192; on a CPU 512]", **_COUNT
    ),
    _engine_option(
        "--overlap/--no-overlap", "Prepare a step while another runs.  [default: overlap; on a CPU not]", default=None
    ),
    _engine_option(
        "--cuda-graph-max-bs", "Largest decode step to capture as a CUDA graph; 0: none.  [default: 512]", **_NUMBER
    ),
    _engine_option(
        "--mixed/--no-mixed",
        "Let decode rows and prompts share steps.  [default: no-mixed; on a CPU mixed]",
        default=None,
    ),
    _engine_option(
        "--share-prefixes/--no-share-prefixes", "Attend to a common prefix once for all its rows.", default=True
    ),
    _engine_option(
        "--batch-invariant",
        "Give a row the same ids whatever runs beside it: see docs/reproducibility.md.",
        is_flag=True,
    ),
    _engine_option("--pynccl/--no-pynccl", "Between GPUs, use NCCL from Python, or torch's.", default=True),
    _engine_option("--check-ranks", "Compare what the ranks run every N steps.", default=0, hidden=True, **_NUMBER),
    _engine_option("--dummy-weights", "Random weights, for benchmarks.", is_flag=True),
    _engine_option(
        "--served-model-name",
        "What jobs call the model.  [default: as --model]",
        metavar="NAME",
        callback=valid_unicode,
    ),
)

sampling_options = _all(
    _sampling_option("--max-tokens", "Most tokens to generate a row; by default, up to the context.", **_NUMBER),
    _sampling_option("--min-tokens", "No end of text before so many tokens.", **_NUMBER),
    _sampling_option("--temperature", "0 (greedy) to 100.  [default: the model's, else 1]", **_REAL),
    _sampling_option(
        "--top-p",
        "Keep the smallest set of tokens of this probability, above 0 and up to 1.  [default: the model's, else 1]",
        **_REAL,
    ),
    _sampling_option(
        "--top-k", "Keep the k most probable tokens; 0 or -1: all.  [default: the model's, else 0]", **_NUMBER
    ),
    _sampling_option(
        "--min-p",
        "Drop tokens below this share, 0 to 1, of the best one's probability.  [default: the model's, else 0]",
        **_REAL,
    ),
    _sampling_option("--seed", "Draw the same again: see docs/results.md.  [default: random, recorded]", **_NUMBER),
    _sampling_option("--n", f"Samples per row, 1 to {MAX_N:,}.  [default: 1]", **_NUMBER),
    _sampling_option(
        "--stop", "Cut the text before this, such as $'\\n'; may be repeated.", multiple=True, metavar="TEXT"
    ),
    _sampling_option("--stop-token-ids", "Stop at any of these tokens.", type=token_ids, metavar="N,N"),
    _sampling_option("--bad-words", "Words that mustn't come; may be repeated.", multiple=True, metavar="TEXT"),
    _sampling_option("--logit-bias", "Added to tokens' logits.", type=token_biases, metavar="N:X,N:X"),
    _sampling_option("--presence-penalty", "For tokens that the output has, -2 to 2.", **_REAL),
    _sampling_option("--frequency-penalty", "For each time that the output has a token, -2 to 2.", **_REAL),
    _sampling_option(
        "--repetition-penalty",
        "Factor for tokens of prompt and output; above 1: fewer of them.  [default: the model's, else 1]",
        **_REAL,
    ),
    _sampling_option(
        "--logprobs", "Give output tokens' log-probabilities, and of the N best in their place.", **_NUMBER
    ),
    _sampling_option("--prompt-logprobs", "The same for the prompt's tokens.", **_NUMBER),
    _sampling_option(
        "--truncate",
        "Of prompts that leave no room for --max-tokens: error rows, or cut their beginning or end.  [default: error]",
        type=click.Choice(get_args(Truncate)),
    ),
    _sampling_option("--row-timeout", "End a text so many seconds after its first token.", **_REAL),
    _sampling_option(
        "--repetition-guard", "End a text when its last N tokens repeat a piece of N/4 tokens or fewer.", **_NUMBER
    ),
    _sampling_option(
        "--choices",
        "Score this instead of generating; once for each: --choices ' good' --choices ' bad'.",
        multiple=True,
        metavar="TEXT",
        callback=several,
    ),
    _sampling_option("--json-schema", "JSON file of the schema that texts follow.", type=schema_file, metavar="FILE"),
    _sampling_option(
        "--structured-outputs",
        """What else texts must be: '{"regex": "[0-9]+"}', '{"choice": ["yes", "no"]}'.""",
        type=json_text,
        metavar="JSON",
    ),
    _sampling_option("--tools", "JSON file of functions that chats may call.", type=json_file, metavar="FILE"),
    _sampling_option(
        "--chat-template-kwargs",
        """Variables of the chat template: '{"enable_thinking": false}'.""",
        type=json_text,
        metavar="JSON",
    ),
    _sampling_option("--continue-final-message", "Go on with chats' last message, an assistant's.", is_flag=True),
    _sampling_option(
        "--split-reasoning", "Write what stands in <think></think> before the answer to reasoning_text.", is_flag=True
    ),
    _sampling_option("--stop-in-reasoning", "Let --stop count in that reasoning, too.", is_flag=True),
    _sampling_option("--include-stop-str-in-output", "Keep what stopped the text.", is_flag=True),
    _sampling_option("--ignore-eos", "Go on after an end-of-sequence token.", is_flag=True),
)

input_options = _all(
    click.option("-o", "--output", metavar="DIR", help="Folder or URL of the dataset.  [default: outputs/JOB]"),
    click.option("--overwrite", is_flag=True, help="Remove a dataset that is in the output folder."),
    click.option("--retry-failed", is_flag=True, help="Going on with a dataset, run its failed rows again, too."),
    click.option("--system", metavar="TEXT", help="System message for rows that have none."),
    click.option("--template", metavar="TEXT", help="Make each prompt from the row's fields: 'Translate: {text}'."),
    click.option("--prompt-column", metavar="NAME", help="The column that holds the prompts."),
    click.option("--messages-column", metavar="NAME", help="The column that holds chat messages."),
    click.option(
        "--settings/--no-settings",
        default=True,
        help="Beside these, read max_tokens, custom_id, ... from columns called so, or take them for data.",
    ),
    click.option("--keep-columns", metavar="A,B", help="Columns to copy to the output."),
    click.option(
        "--chat/--no-chat",
        default=None,
        help="Send prompts as chat messages, or as they are.  [default: as they are; as chat with a system message or "
        "a template]",
    ),
    click.option("--limit", help="Only the first so many rows.", **_COUNT),
    click.option(
        "--on-error",
        type=click.Choice(["fail", "record"]),
        default="fail",
        show_default=True,
        help="What rows that can't be used do: refuse the input, or become error rows.",
    ),
    click.option(
        "--max-faults",
        type=WholeNumber(min=0),
        metavar="N",
        default=MAX_SHOWN,
        show_default=True,
        help="List so many rows that can't be used.",
    ),
    click.option(
        "--chunk-rows",
        type=WholeNumber(1, 256),
        metavar="N",
        default=256,
        show_default=True,
        help="Rows per Parquet part.",
    ),
    click.option(
        "--by-reference/--by-value",
        default=None,
        help="Let workers read the rows where they are, or send them through Redis.  [default: send up to 64 MiB]",
    ),
    click.option("--token-ids", is_flag=True, help="Write the output_token_ids column."),
    click.option("--job-id", metavar="NAME", help="Name the job.  [default: the file's name and the date]"),
)


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The engine's config in the values of `model_option` and `engine_options`.

    Raises:
        InvalidParameterError: a value can't be used; names the field.
    """
    return EngineConfig(**{field.name: options[field.name] for field in fields(EngineConfig)})


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """The sampling of a job in the values of `sampling_options`; `--seed` is the job's, not a row's.

    Raises:
        InvalidParameterError: a value can't be used; names the field.
    """
    given = {name: options[name] for name in _SAMPLING_FIELDS}
    given |= {name: given[name] or None for name in (*_STRINGS, *_FLAGS)}
    schema, more = options["json_schema"], given["structured_outputs"]
    if schema is None:
        return SamplingParams(**given)
    if more is not None and (not isinstance(more, dict) or more.keys() - {"disable_any_whitespace"}):
        raise InvalidParameterError(
            "json_schema", 'stands beside --structured-outputs, which may only add {"disable_any_whitespace": true}'
        )
    given["structured_outputs"] = {"json": schema, **(more or {})}
    try:
        return SamplingParams(**given)
    except InvalidParameterError as error:
        if error.field == "structured_outputs":
            raise InvalidParameterError("json_schema", error.reason) from None
        raise


def prepare_options(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `minisgl_jobs.submission.prepare` in the values of `input_options` and `sampling_options`.

    Raises:
        InvalidParameterError: a value can't be used; names the field.
    """
    from minisgl_batch.cli.job_checks import grammar_problem
    from minisgl_jobs.rows import ReadOptions

    keep = tuple((options["keep_columns"] or "").split(",")) if options["keep_columns"] else ()
    read = ReadOptions(**{name: options[name] for name in _READ_FIELDS}, keep_columns=keep)
    rest = {name: options[name] for name in _SUBMISSION_FIELDS}
    rest["transport"] = _TRANSPORTS[options["by_reference"]]
    params = sampling_params(options)
    if params.structured_outputs is not None and (problem := grammar_problem(params.structured_outputs)):
        field = "structured_outputs" if options["json_schema"] is None else "json_schema"
        raise InvalidParameterError(field, problem)
    return {**rest, "params": params, "read": read}
