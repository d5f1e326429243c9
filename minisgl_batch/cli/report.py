"""What a job that has ended came to: its outcome in a few lines, and the exit code for it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, takewhile

import pyarrow as pa

from minisgl_batch.cli.console import talk
from minisgl_batch.errors import OutputError
from minisgl_batch.words import count, duration, one_line
from minisgl_jobs.dataset import Manifest, manifest_of, read_batches, read_manifest
from minisgl_jobs.model import JobSpec, JobState, Row, RowResult
from minisgl_jobs.parts import output_place
from minisgl_jobs.results import table_to_results
from minisgl_jobs.status import JobStatus

NUM_ERRORS_SHOWN = 3
_PROMPT_CHARS, _TEXT_CHARS = 50, 60


def exit_code(state: JobState) -> int:
    """0 only when every row succeeded."""
    return 0 if state is JobState.FINISHED else 1


def dataset_status(spec: JobSpec) -> JobStatus:
    """The status of a job that has ended, as its dataset tells: no Redis needs to know it.

    Raises:
        OutputError: the dataset isn't there (any more), or is damaged.
    """
    manifest = read_manifest(output_place(spec.output))
    if manifest is None:
        raise OutputError(f"{spec.output} holds no dataset (any more)")
    return JobStatus(
        spec=spec,
        state=manifest.state,
        epoch=manifest.epoch,
        rows_ok=manifest.num_ok,
        rows_error=manifest.num_errors,
        chunks_done=len(manifest.parts),
        leases=(),
        created_at=manifest.submitted_at.timestamp(),
        queued_at=None,
        started_at=None,
        finished_at=manifest.finished_at.timestamp(),
        now=time.time(),
        num_deaths=0,
        num_workers=0,
        paused=False,
        error=manifest.reason or "",
    )


def report(status: JobStatus, examples: Sequence[Row] = (), *, retry: str = "") -> None:
    """Tell what became of a job that has ended, with a few rows where the dataset is in reach.

    Args:
        examples: rows whose texts are shown.
        retry: how failed rows run again; by default as those of a service.
    """
    manifest = manifest_of(output_place(status.spec.output), status.job_id)
    began = max(status.started_at or 0.0, status.queued_at or status.created_at)  # of this retry, if it is one
    seconds = max((status.finished_at or status.now) - began, 1e-3)
    details = [f"{count(status.rows_ok, 'row')} ok, {status.rows_error:,} failed in {duration(seconds)}"]
    if manifest is not None and manifest.completion_tokens:
        # What an earlier epoch generated says nothing about the rate of this one.
        rate = f" ({manifest.completion_tokens / seconds:,.0f}/s)" if not status.epoch else " in all"
        details.append(f"{manifest.completion_tokens:,} tokens generated{rate}")
    if manifest is not None and manifest.cached_tokens:
        details.append(f"{manifest.cached_tokens / manifest.prompt_tokens:.0%} of prompt tokens from the cache")
    talk(f"{status.state.value}: {'; '.join(details)}")
    if manifest is not None and (cut := cut_texts(manifest)):
        talk(cut)
    if status.error:
        talk(f"why: {one_line(status.error)}")
    if manifest is not None:
        _show_examples(status, examples)
        show_errors(status)
    if status.state is JobState.PARTIAL:
        _tell_of_retry(status, manifest, retry or f"minisgl-batch retry {status.job_id}")


def may_succeed(error_types: Collection[str]) -> bool:
    """Whether rows that have failed so may succeed when they run again: not where all are at fault themselves."""
    return set(error_types) != {"invalid_request"}


def _tell_of_retry(status: JobStatus, manifest: Manifest | None, retry: str) -> None:
    """How failed rows run again, where that is of use."""
    types = manifest.num_by_error_type if manifest is not None else {}
    if may_succeed(types):
        talk(f"to run {'it' if status.rows_error == 1 else 'them'} again: {retry}")
    if "prompt_too_long" in types:
        talk("with another --truncate it is another job: give it another --output")


def cut_texts(manifest: Manifest) -> str:
    """How many texts ended for their length, "" for none."""
    if not manifest.num_cut:
        return ""
    num_texts = sum(part.num_rows for part in manifest.parts) - sum(manifest.num_by_error_type.values())
    asked = manifest.sampling.structured_outputs
    what = "; as structured outputs these aren't complete" if asked is not None and asked.kinds else ""
    return f"{manifest.num_cut:,} of {count(num_texts, 'text')} ended by max_tokens or with the context{what}"


def _show_examples(status: JobStatus, examples: Sequence[Row]) -> None:
    """A few rows as `prompt -> text`, for a first look."""
    prompts = {row.row_index: _prompt_text(row) for row in examples}
    for result in takewhile(lambda result: result.row_index <= max(prompts, default=-1), _results(status)):
        prompt = prompts.get(result.row_index)
        if prompt is not None and result.sample_index == 0 and result.error is None:
            talk(f'  "{one_line(prompt, _PROMPT_CHARS)}" -> "{one_line(result.text, _TEXT_CHARS)}"')


def show_errors(status: JobStatus) -> None:
    """The first error rows of a job that has ended."""
    num_errors = status.rows_error
    errors = (result for result in _results(status) if result.error is not None) if num_errors else iter(())
    for result in islice(errors, NUM_ERRORS_SHOWN):
        talk(f"  failed: {_row_label(result)}: {_error_text(result)}")
    if num_errors > NUM_ERRORS_SHOWN:
        talk(f"  ... and {count(num_errors - NUM_ERRORS_SHOWN, 'more row')}")


def _results(status: JobStatus) -> Iterator[RowResult]:
    for batch in read_batches(output_place(status.spec.output)):
        yield from table_to_results(pa.Table.from_batches([batch]))


def _row_label(result: RowResult) -> str:
    """What a person calls a result's row."""
    return one_line(result.custom_id or "") or f"row_index {result.row_index}"


def _error_text(result: RowResult) -> str:
    """Why a row failed, on one line."""
    return one_line(f"{result.error.type}: {result.error.message}") if result.error else ""


def _prompt_text(row: Row) -> str:
    if row.prompt is not None:
        return row.prompt
    if row.messages:
        return str(row.messages[-1].get("content") or "")
    return f"[{len(row.prompt_token_ids or ())} token ids]"
