"""Submits jobs and follows them: what a program needs that isn't a worker. Imports no torch.

    with Client("redis://localhost:6379") as client:
        job = client.submit(["What is 17 + 25?"], model="demo", output="answers", max_tokens=16)
        job.wait()
        for row in job.rows():
            print(row.text)

`AsyncClient` is the same for asyncio.
"""

from minisgl_batch.client.async_client import AsyncClient, AsyncJobHandle
from minisgl_batch.client.client import Client
from minisgl_batch.client.handle import JobHandle
from minisgl_batch.client.progress import Progress
from minisgl_jobs.model import JobState

__all__ = ["AsyncClient", "AsyncJobHandle", "Client", "JobHandle", "JobState", "Progress"]
