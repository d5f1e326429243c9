"""Warnings that are logged when a job is submitted: it can be queued, and may still not be what was meant."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from minisgl_batch.other_fields import nearest
from minisgl_jobs.model import JobSpec
from minisgl_jobs.resume import Resumption, engine_differences
from minisgl_jobs.status import WorkerInfo
from minisgl_jobs.stores import url_scheme
from minisgl_jobs.submission import Submission

logger = logging.getLogger(__name__)


def warn_if_unserved(model: str, workers: Sequence[WorkerInfo]) -> None:
    """Of all models' living workers, none serves this one."""
    served = sorted({worker.model for worker in workers})
    if model not in served:
        near = nearest(model, frozenset(served))
        others = f"; workers serve {', '.join(served)}" if served else ""
        others += f"; did you mean {near}?" if near else ""
        logger.warning("no worker serves %s now: its jobs wait until one does%s", model, others)


def warn_if_tools_are_dropped(submission: Submission, workers: Sequence[WorkerInfo]) -> None:
    """By the chat template, which this model's living workers know."""
    model = submission.spec.model
    if submission.has_tools and any(worker.drops_tools for worker in workers if worker.model == model):
        logger.warning("%s", dropped_tools(model))


def dropped_tools(model: str) -> str:
    """What is said about tools that the model's chat template drops."""
    return f"the chat template of {model} has no tools in it: the model won't see those given"


def warn_of_distant_workers(uri: str, workers: Sequence[WorkerInfo]) -> None:
    """Only other machines' workers would read an input, which is at `uri`, from this one's disk."""
    if url_scheme(uri):
        return
    hosts = sorted({worker.host for worker in workers})
    if hosts and socket.gethostname() not in hosts:
        logger.warning(
            "workers on %s read %s themselves: it must be there, too; if it isn't, submit with --by-value",
            ", ".join(hosts),
            uri,
        )


def warn_of_other_engines(spec: JobSpec, resumption: Resumption, workers: Sequence[WorkerInfo]) -> None:
    """The job goes on with rows that its living workers would generate otherwise."""
    if differences := engine_differences(resumption.engines, [worker.description for worker in workers]):
        logger.warning("rows in %s are another engine's, and stay: %s", spec.output, differences)
