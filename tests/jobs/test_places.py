"""URLs of any kind: what a store makes of them is one error of ours, which names the URL."""

from __future__ import annotations

import pytest
import redis

from minisgl_batch.errors import OutputDeniedError, UsageError
from minisgl_jobs.finalise import finalise
from minisgl_jobs.keys import queue_name
from minisgl_jobs.model import JobState
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.parts import output_place
from minisgl_jobs.places import place
from minisgl_jobs.queue import JobQueue
from tests.jobs.helpers import MODEL, make_spec, submit

ODD_URLS = [
    "reference://::data:application/json;base64,e30=",
    "dir://x/y",
    "http://[::1",
    "file://[::1",
    "simplecache://x",
]


@pytest.mark.parametrize("url", ODD_URLS)
def test_a_url_that_a_store_chokes_on_is_refused_by_name(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        place(url)
    assert url in str(caught.value)
    with pytest.raises(OutputDeniedError):
        output_place(url)


@pytest.mark.parametrize("url", ODD_URLS)
def test_a_canceled_job_ends_where_its_output_cannot_be(client: redis.Redis, url: str) -> None:
    queue, outbox = JobQueue(client), Outbox(client, queue_name(MODEL))
    spec = submit(queue, make_spec(output=url))
    queue.cancel(spec.job_id)
    claim = outbox.claim(60)
    assert claim is not None
    assert finalise(outbox, claim.job_id, claim.epoch) is JobState.CANCELED
    status = queue.status(spec.job_id)
    assert status.state is JobState.CANCELED
    assert url in status.error
