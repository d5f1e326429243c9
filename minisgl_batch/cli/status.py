"""`minisgl-batch status`: one job, or all that goes on, at this moment or again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import msgspec
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from minisgl_batch.cli.console import print_fields, print_json, print_line, talk
from minisgl_batch.cli.options import job_shell_complete, json_option, redis_option
from minisgl_batch.cli.report import cut_texts, exit_code
from minisgl_batch.cli.sections import Number, WholeNumber
from minisgl_batch.cli.service import open_client
from minisgl_batch.cli.watch import table, watch
from minisgl_batch.client import Progress
from minisgl_batch.client.show import JOB_COLUMNS, WORKER_COLUMNS, Overview, job_row, worker_row
from minisgl_batch.errors import OutputError, UsageError
from minisgl_batch.words import count, duration, one_line
from minisgl_jobs.dataset import Manifest, manifest_of
from minisgl_jobs.model import JobState
from minisgl_jobs.parts import output_place
from minisgl_jobs.status import JobStatus, WorkerInfo


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False, shell_complete=job_shell_complete)
@click.option("--watch", "is_watch", is_flag=True, help="Again and again, until the job has ended or Ctrl-C.")
@click.option("--interval", type=Number(0.05, 3600), default=1.0, show_default=True, metavar="SECONDS")
@click.option("--model", metavar="MODEL", help="Without JOB: only jobs and workers of this model.")
@click.option("--limit", type=WholeNumber(1, 10_000), default=20, show_default=True, help="Without JOB: most jobs.")
@redis_option
@json_option
@click.pass_context
def status(
    ctx: click.Context,
    job_id: str | None,
    is_watch: bool,
    interval: float,
    model: str | None,
    limit: int,
    redis_url: str | None,
    as_json: bool,
) -> None:
    """Show how far a job is, or all jobs and workers.

    With --watch the view is drawn anew on a terminal; elsewhere each look is printed (with --json as a line). Watching
    a job ends with it: exit code 0 only when every row succeeded. Ctrl-C ends the view, not the job.
    """
    with open_client(redis_url) as client:
        if job_id is None:
            _show_overview(lambda: client.overview(model=model, limit=limit), interval if is_watch else None, as_json)
            return
        job = client.job(job_id)
        job.tend()
        seen = _show_job(job.progress, interval if is_watch else None, as_json)
    if is_watch:
        ctx.exit(exit_code(seen.state))


def _show_job(look: Callable[[], Progress], interval: float | None, as_json: bool) -> Progress:
    def write(progress: Progress) -> None:
        if as_json:
            print_json(progress_record(progress, _manifest(progress.status)))
        else:
            print_fields(_fields(progress, _manifest(progress.status)))
            if interval is not None:
                print_line("")

    if interval is None:
        seen = look()
        write(seen)
        return seen

    def draw(progress: Progress) -> RenderableType:
        bar = ProgressBar(total=progress.num_rows, completed=progress.rows_done, width=40)
        rows = ((name, value) for name, value in _fields(progress, _manifest(progress.status)) if value)
        return Group(table(("", ""), rows), bar)

    return watch(look, draw, write, interval_s=interval, is_over=lambda progress: progress.state.is_final)


def _show_overview(look: Callable[[], Overview], interval: float | None, as_json: bool) -> None:
    def write(seen: Overview) -> None:
        if as_json:
            jobs = [progress_record(job, None) for job in seen.jobs]
            print_json({"jobs": jobs, "workers": [worker_record(worker) for worker in seen.workers]})
            return
        print_line(str(seen))
        if interval is not None:
            print_line("")

    def draw(seen: Overview) -> RenderableType:
        jobs = table(JOB_COLUMNS, map(job_row, seen.jobs))
        workers = table(WORKER_COLUMNS, map(worker_row, seen.workers))
        return Group(jobs, Text(), workers, Text(), Text(seen.summary, style="bold"))

    if interval is None:
        write(look())
    else:
        watch(look, draw, write, interval_s=interval)


def _manifest(found: JobStatus) -> Manifest | None:
    """What the dataset says of itself, where it can be read."""
    if not found.state.is_final:
        return None
    try:
        return manifest_of(output_place(found.spec.output), found.job_id)
    except (OutputError, UsageError) as error:  # such as a store that this machine has no package for
        talk(f"warning: {error}")
        return None


def worker_record(worker: WorkerInfo) -> dict[str, Any]:
    """A worker as JSON for scripts."""
    return {field.name: getattr(worker, field.name) for field in msgspec.structs.fields(worker)}


def status_record(found: JobStatus) -> dict[str, Any]:
    """A job as JSON for scripts; times are Unix seconds. Counts of tokens and texts are there once it has ended."""
    return _record(found, _manifest(found))


def _record(found: JobStatus, manifest: Manifest | None) -> dict[str, Any]:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
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
        "tokens": None if manifest is None else {name: getattr(manifest, name) for name in names},
        "texts_cut": None if manifest is None else manifest.num_cut,
    }


def progress_record(progress: Progress, manifest: Manifest | None) -> dict[str, Any]:
    """The same with what only a closer look tells; rate and share of a job that has ended are those of all of it."""
    rate, share = progress.tokens_per_s, progress.cached_share
    if manifest is not None:
        found = progress.status
        if found.started_at and found.finished_at and not found.epoch:
            rate = manifest.completion_tokens / max(found.finished_at - found.started_at, 1e-3)
        share = manifest.cached_tokens / manifest.prompt_tokens if manifest.prompt_tokens else None
    return {
        **_record(progress.status, manifest),
        "rows_done": progress.rows_done,
        "tokens_per_s": rate,
        "cached_share": share,
        "eta_s": progress.eta_s,
        "trouble": progress.trouble or None,
    }


def _fields(progress: Progress, manifest: Manifest | None) -> list[tuple[str, str]]:
    found = progress.status
    spec = found.spec
    return [
        ("job", found.job_id),
        ("state", found.state.value),
        ("waiting", found.waiting or one_line(progress.trouble)),
        ("why", one_line(found.error) if found.state.is_final else ""),
        ("model", one_line(spec.model)),
        ("rows", _rows(progress)),
        ("failed", count(found.rows_error, "row") if found.rows_error else ""),
        ("tokens", _tokens(progress, manifest)),
        ("cut", cut_texts(manifest) if manifest is not None else ""),
        ("left", duration(progress.eta_s) if progress.eta_s is not None else ""),
        ("submitted", _moment(found.created_at, found.now)),
        ("started", _moment(found.started_at, found.now)),
        ("ended", _moment(found.finished_at, found.now)),
        ("workers", ", ".join(_leases(found))),
        ("recovered", f"{count(found.num_deaths, 'chunk')} whose worker was lost" if found.num_deaths else ""),
        ("output", one_line(spec.output)),
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
