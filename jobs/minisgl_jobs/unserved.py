"""What clients do for jobs of a model that no worker serves (any more), so that none waits for its end for ever.

A canceled job, and one whose last worker died before it was finalised, need no engine: whoever sees the output folder
can bring them to their last state. So can one whose predecessor won't come. Called by clients that cancel a job or wait
for one.
"""

from __future__ import annotations

import logging

import redis

from minisgl_batch.errors import DamagedJobError, JobStateError, OutputError, UsageError
from minisgl_jobs.dataset import dataset_job
from minisgl_jobs.finalise import finalise
from minisgl_jobs.held import HeldJobs
from minisgl_jobs.keys import queue_name
from minisgl_jobs.model import JobState
from minisgl_jobs.outbox import FinalisingJob, Outbox
from minisgl_jobs.parts import output_place, pending_name, scan_parts
from minisgl_jobs.places import Place
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.status import JobStatus
from minisgl_jobs.tasks import forget_start

logger = logging.getLogger(__name__)


def end_unserved(client: redis.Redis, status: JobStatus) -> None:
    """Bring a job that only has to be ended nearer to its end, if no worker serves its model. May be repeated.

    Raises:
        RedisUnavailableError: Redis is away.
    """
    if status.num_workers or not (status.is_held or status.state in (JobState.CANCELING, JobState.FINALISING)):
        return
    queue, held = JobQueue(client), HeldJobs(client, queue_name(status.spec.model))
    if status.is_held:
        held.start(status.job_id)
        status = queue.status(status.job_id)
    if status.state is JobState.CANCELING:
        try:
            queue.cancel(status.job_id)  # ends the leases of workers that are gone
        except JobStateError:
            return  # it has ended meanwhile
        status = queue.status(status.job_id)
    if status.state is JobState.FINALISING:
        _finalise(Outbox(client, held.queue), status)
        forget_start(client, status.job_id)
        for queue_of, follower in held.followers(status.job_id):
            HeldJobs(client, queue_of).start(follower)


def _finalise(outbox: Outbox, status: JobStatus) -> None:
    job = outbox.load(status.job_id, status.epoch)
    if job is None:
        return
    try:
        if _is_all_here(job, output_place(job.spec.output)):
            finalise(outbox, status.job_id, status.epoch)
        elif job.is_canceled and not job.num_done and not job.left_over:
            # Nothing of it was ever written anywhere.
            outbox.finish(status.job_id, status.epoch, JobState.CANCELED, error=job.cancel_reason)
    except (OutputError, UsageError) as error:  # such as a store that this machine has no package for
        logger.warning("job %s waits for a worker to finalise it: %s", status.job_id, error)


def _is_all_here(job: FinalisingJob, folder: Place) -> bool:
    """Whether the folder is the job's, and not another one of this name on another machine: all parts are in it."""
    if dataset_job(folder) != job.spec.job_id:
        return False
    parts = {part.info.chunk: part.info.epoch for part in scan_parts(folder)}
    try:
        unconfirmed = {
            chunk
            for chunk, (token, epoch) in job.renames.items()
            if parts.get(chunk) != epoch and (folder / pending_name(chunk, epoch, token)).exists()
        }
    except DamagedJobError:
        return True  # no machine has such a part: finalise says so
    vanished = {chunk for chunk, (_, epoch) in job.renames.items() if parts.get(chunk) != epoch} - unconfirmed
    return not vanished and len(parts.keys() | unconfirmed) >= job.num_done
