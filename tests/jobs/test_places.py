"""URLs of any kind: what a store makes of them is one error of ours, which names the URL."""

from __future__ import annotations

import pytest
import redis

from minisgl_batch.errors import (
    InputUnavailableError,
    InputUnreachableError,
    OutputDeniedError,
    StoreUnavailableError,
    UsageError,
)
from minisgl_jobs.finalise import finalise
from minisgl_jobs.inputs import open_source
from minisgl_jobs.keys import queue_name
from minisgl_jobs.model import JobState
from minisgl_jobs.outbox import Outbox
from minisgl_jobs.parts import output_place
from minisgl_jobs.places import place
from minisgl_jobs.queue import JobQueue
from minisgl_jobs.submission import output_folder
from tests.jobs.helpers import MODEL, make_spec, submit
from tests.jobs.tcp_server import free_port

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


def test_a_store_that_does_not_answer_is_no_mistake_of_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is asked when it is opened, as FTP's, or when it is read."""
    away = f"127.0.0.1:{free_port()}"
    variables = {"AWS_ENDPOINT_URL": f"http://{away}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**variables, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnavailableError, match=f"ftp://{away}/out can't be used: .*refused") as opened:
        output_folder(f"ftp://{away}/out", "job")
    with pytest.raises(InputUnavailableError, match=r"s3://bucket/in\.jsonl can't be read") as read:
        open_source("s3://bucket/in.jsonl")
    with pytest.raises(InputUnreachableError, match="no such file") as missing:
        open_source("/no/such.jsonl")
    assert (opened.value.exit_code, read.value.exit_code, missing.value.exit_code) == (1, 1, 2)


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
