"""`minisgl-batch status`: one job at this moment."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from minisgl_batch.cli.console import duration, one_line, print_fields
from minisgl_batch.cli.options import job_argument, json_option, redis_option
from minisgl_batch.cli.service import open_client
from minisgl_batch.client import Progress
from minisgl_jobs.dataset import Manifest, read_manifest
from minisgl_jobs.model import JobState
from minisgl_jobs.parts import output_place
from minisgl_jobs.status import JobStatus


@click.command()
@job_argument
@redis_option
@json_option
def status(job_id: str, redis_url: str | None, as_json: bool) -> None:
    """Show how far a job is."""
    with open_client(redis_url) as client:
        progress = client.job(job_id).progress()
    manifest = read_manifest(output_place(progress.status.spec.output)) if progress.state.is_final else None
    if as_json:
        click.echo(json.dumps(progress_record(progress, manifest)))
    else:
        print_fields(_fields(progress, manifest))


def status_record(found: JobStatus) -> dict[str, Any]:
    """A job as JSON for scripts; times are Unix seconds."""
    return {
        "job_id": found.job_id,
        "state": found.state.value,
        "model": found.spec.model,
        "priority": found.spec.priority.value,
        "output": found.spec.output,
        "num_rows": found.spec.num_rows,
        "rows_ok": found.rows_ok,
        "rows_error": found.rows_error,
        "results_spooled": found.num_spooled,
        "workers": sorted({lease.worker_id for lease in found.leases}),
        "created_at": found.created_at,
        "queued_at": found.queued_at,
        "started_at": found.started_at,
        "finished_at": found.finished_at,
        "waiting": found.waiting or None,
        "after": found.after or None,
        "start_at": found.start_at,
        "error": found.error or None,
    }


def progress_record(progress: Progress, manifest: Manifest | None) -> dict[str, Any]:
    """The same with what only a closer look tells."""
    tokens = None
    if manifest is not None:
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        tokens = {name: getattr(manifest, name) for name in names}
    return {
        **status_record(progress.status),
        "rows_done": progress.rows_done,
        "tokens_per_s": progress.tokens_per_s,
        "cached_share": progress.cached_share,
        "eta_s": progress.eta_s,
        "tokens": tokens,
    }


def _fields(progress: Progress, manifest: Manifest | None) -> list[tuple[str, str]]:
    found = progress.status
    spec = found.spec
    return [
        ("job", found.job_id),
        ("state", found.state.value),
        ("waiting", found.waiting),
        ("why", one_line(found.error)),
        ("model", spec.model),
        ("rows", _rows(progress)),
        ("failed", f"{found.rows_error:,} rows" if found.rows_error else ""),
        ("tokens", _tokens(progress, manifest)),
        ("left", duration(progress.eta_s) if progress.eta_s is not None else ""),
        ("submitted", _moment(found.created_at, found.now)),
        ("started", _moment(found.started_at, found.now)),
        ("ended", _moment(found.finished_at, found.now)),
        ("workers", ", ".join(_leases(found))),
        ("lost", f"{found.num_deaths} times a worker died over it" if found.num_deaths else ""),
        ("output", spec.output),
    ]


def _rows(progress: Progress) -> str:
    text = f"{progress.rows_done:,} of {progress.num_rows:,} done"
    unfinished = progress.rows_done - progress.status.rows_done
    return f"{text}, {unfinished:,} of them in unfinished chunks" if unfinished else text


def _tokens(progress: Progress, manifest: Manifest | None) -> str:
    if manifest is not None:
        share = f" ({manifest.cached_tokens / manifest.prompt_tokens:.0%} cached)" if manifest.prompt_tokens else ""
        return f"{manifest.completion_tokens:,} generated from {manifest.prompt_tokens:,} of prompts{share}"
    if progress.state is not JobState.RUNNING:
        return ""
    cached = f", {progress.cached_share:.0%} of prompts cached" if progress.cached_share is not None else ""
    return f"{progress.tokens_per_s:,.0f}/s{cached}"


def _leases(found: JobStatus) -> list[str]:
    chunks: dict[str, list[str]] = {}
    for lease in sorted(found.leases, key=lambda lease: lease.chunk):
        chunks.setdefault(lease.worker_id, []).append(str(lease.chunk))
    return [f"{worker} (chunk {', '.join(numbers)})" for worker, numbers in sorted(chunks.items())]


def _moment(at: float | None, now: float) -> str:
    if at is None:
        return ""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))} ({duration(now - at)} ago)"
