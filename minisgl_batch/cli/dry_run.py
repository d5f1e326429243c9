"""`minisgl-batch submit --dry-run`: what a job would come to, without queueing it."""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from minisgl_batch.cli.console import print_fields, print_line, show_num_left_out, talk
from minisgl_batch.cli.job_checks import warn_of_dropped_tools
from minisgl_batch.cli.service import open_client
from minisgl_batch.engine_extra import missing_engine_modules
from minisgl_batch.errors import InvalidParameterError, ModelError, RedisUnavailableError, RequestError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.hub import commit_of, model_path
from minisgl_batch.words import count, duration, one_line, size
from minisgl_jobs.model import JobSpec, Row
from minisgl_jobs.status import WorkerInfo
from minisgl_jobs.submission import Submission

BAR_CHARS = 40


@dataclass
class TokenCounts:
    """What a model's tokenizer makes of all rows.

    Attributes:
        context: the model's, in tokens.
        revision: the commit of the tokenizer; None where the model is no hub id.
        prompt_tokens: of each row that can be served, after `truncate`.
        max_output_tokens: most tokens that these rows may generate, samples included.
        num_refused: rows that the model can't serve.
        num_too_long: those of them that don't fit into the context.
        refused: the first of them, and why.
    """

    context: int
    revision: str | None = None
    prompt_tokens: array[int] = field(default_factory=lambda: array("I"))
    max_output_tokens: int = 0
    num_refused: int = 0
    num_too_long: int = 0
    refused: list[tuple[Row, RequestError]] = field(default_factory=list)

    def refuse(self, row: Row, error: RequestError, max_listed: int) -> None:
        self.num_refused += 1
        self.num_too_long += error.error_type == "prompt_too_long"
        if len(self.refused) < max_listed:
            self.refused.append((row, error))


def dry_run(submission: Submission, redis_url: str | None, *, max_faults: int, as_json: bool) -> bool:
    """Print what a job would come to; tokens only where the engine is installed.

    Args:
        max_faults: how many rows that the model can't serve are listed.

    Returns:
        Whether every row can succeed, as far as this shows.
    """
    spec = submission.spec
    missing = missing_engine_modules()
    workers = () if missing else _workers(redis_url, spec.model)
    commits = {str(worker.description["revision"]) for worker in workers if "revision" in worker.description}
    tokens = None
    if not missing:
        folder = _tokenizer_folder(spec.model, commits)
        warn_of_dropped_tools(submission, folder)
        tokens = count_tokens(submission, folder, max_faults)
    all_good = not submission.faults.num_faults and not (tokens and tokens.num_refused)
    rate = sum(worker.tokens_per_s for worker in workers)
    if as_json:
        click.echo(json.dumps(_record(submission, tokens, rate)))
        return all_good
    print_fields(_fields(submission, tokens, rate, commits))
    if tokens and tokens.prompt_tokens:
        print_line("")
        _print_histogram(tokens.prompt_tokens)
    if tokens:
        for row, error in tokens.refused:
            talk(one_line(f"  {_row_label(row)}: {error}"))
        show_num_left_out(tokens.refused, tokens.num_refused)
    if missing:
        talk(f"tokens aren't counted without {', '.join(missing)}: pip install 'minisgl-batch[engine]'")
    talk("nothing was queued")
    return all_good


def _row_label(row: Row) -> str:
    return row.custom_id or f"row_index {row.row_index}"


def _tokenizer_folder(model: str, commits: set[str]) -> Path:
    """The model's folder at the one commit that its workers run, if there is one and it can be had.

    Else as its name alone says. Errors as `model_path`.
    """
    if len(commits) == 1:
        # They may serve another model under this name, or a folder here has it.
        with suppress(ModelError, InvalidParameterError):
            return model_path(model.partition("@")[0], *commits, weights=False)
    return model_path(model, weights=False)


def count_tokens(submission: Submission, folder: Path, max_listed: int) -> TokenCounts:
    """Tokenize all rows as a worker would.

    Args:
        folder: the model's.
        max_listed: of the rows that can't be served.

    Raises:
        ModelError: the model has no usable tokenizer.
    """
    from minisgl_batch.tokenizer import ModelTokenizer, hide_torch, resolve_requests

    if "torch" not in sys.modules:
        hide_torch()  # nothing is computed before this process ends
    spec = submission.spec
    tokenizer = ModelTokenizer.load(folder)
    counts = TokenCounts(context=tokenizer.max_len, revision=commit_of(folder))
    with closing(GrammarCheck()) as check:
        for chunk in submission.chunks():
            rows = [row for row in chunk if row.error is None]
            requests = resolve_requests(
                tokenizer,
                [row.input for row in rows],
                [row.params for row in rows],
                [row.row_index for row in rows],
                defaults=spec.params,
                max_len=tokenizer.max_len,
                job_seed=spec.seed,
                system=spec.system,
                check=check,
            )
            for row, resolved in zip(rows, requests, strict=True):
                if isinstance(resolved, RequestError):
                    counts.refuse(row, resolved, max_listed)
                    continue
                counts.prompt_tokens.append(len(resolved.prompt_ids))
                if not resolved.choices:
                    counts.max_output_tokens += resolved.sampling.max_tokens * resolved.num_samples
    return counts


def _workers(redis_url: str | None, model: str) -> Sequence[WorkerInfo]:
    """The model's living workers; none when that can't be said."""
    try:
        with open_client(redis_url) as client:
            return client.workers(model=model)
    except RedisUnavailableError as error:
        talk(f"no estimate of the time: {error}")
        return ()


def _fields(
    submission: Submission, tokens: TokenCounts | None, rate: float, commits: set[str]
) -> list[tuple[str, str]]:
    spec = submission.spec
    found = [("rows", f"{spec.num_rows:,} in {count(spec.num_chunks, 'chunk')}, {size(submission.num_bytes)} in Redis")]
    if submission.faults.num_faults:
        found.append(("faulty", f"{submission.faults.num_faults:,} become error rows"))
    if tokens is None:
        return found
    if tokens.revision is not None:
        others = "" if commits <= {tokens.revision} else f"; its workers run {', '.join(sorted(commits))}"
        found.append(("tokenizer", f"of revision {tokens.revision}{others}"))
    lengths = tokens.prompt_tokens
    if lengths:
        spread = f"{sum(lengths) / len(lengths):,.0f} a row"
        if min(lengths) < max(lengths):
            spread += f", {min(lengths):,} to {max(lengths):,}"
        found.append(("prompt tokens", f"{sum(lengths):,} ({spread})"))
        found.append(("output tokens", f"at most {tokens.max_output_tokens:,}{_bound(spec, tokens)}"))
    if tokens.num_refused:
        found.append(("refused", f"{count(tokens.num_refused, 'row')} can't be served{_too_long(tokens)}"))
    if rate:
        time_left = duration(tokens.max_output_tokens / rate)
        found.append(("time", f"at most {time_left} at the {rate:,.0f} tok/s that its workers make now"))
    return found


def _too_long(tokens: TokenCounts) -> str:
    """How many of the rows that can't be served are too long, if any."""
    if not tokens.num_too_long:
        return ""
    number = "" if tokens.num_too_long == tokens.num_refused else f"{tokens.num_too_long:,} of them "
    return f": {number}too long for the context of {tokens.context:,} tokens"


def _bound(spec: JobSpec, tokens: TokenCounts) -> str:
    is_bounded = spec.params.max_tokens or not tokens.max_output_tokens
    return "" if is_bounded else ", up to the context where a row has no max_tokens"


def _record(submission: Submission, tokens: TokenCounts | None, rate: float) -> dict[str, Any]:
    spec = submission.spec
    record: dict[str, Any] = {
        "model": spec.model,
        "num_rows": spec.num_rows,
        "num_chunks": spec.num_chunks,
        "num_faults": submission.faults.num_faults,
        "num_bytes": submission.num_bytes,
    }
    if tokens is not None:
        record |= {
            "context": tokens.context,
            "revision": tokens.revision,
            "prompt_tokens": sum(tokens.prompt_tokens),
            "longest_prompt_tokens": max(tokens.prompt_tokens, default=0),
            "max_output_tokens": tokens.max_output_tokens,
            "num_refused": tokens.num_refused,
            "num_too_long": tokens.num_too_long,
            "refused": [
                {"row_index": row.row_index, "error_type": error.error_type, "error_message": str(error)}
                for row, error in tokens.refused
            ],
            "max_seconds": tokens.max_output_tokens / rate if rate else None,
        }
    return record


def _print_histogram(lengths: array[int]) -> None:
    """Rows by prompt length, in ranges that double."""
    exponents = Counter(length.bit_length() - 1 for length in lengths)
    tallest = max(exponents.values())
    print_line(f"{'prompt tokens':>17}  {'rows':>10}", style="bold")
    for exponent in range(min(exponents), max(exponents) + 1):
        num_rows = exponents[exponent]
        span = f"{1 << exponent:,} to {(2 << exponent) - 1:,}" if exponent else "1"
        print_line(f"{span:>17}  {num_rows:>10,}  {'#' * -(-num_rows * BAR_CHARS // tallest)}")
