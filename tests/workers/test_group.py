"""Whole worker groups, with an engine that echoes: what they do when processes die, Redis goes or rows are poison."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from minisgl_batch.client import Client, JobHandle
from minisgl_jobs.connection import connect
from minisgl_jobs.dataset import SUCCESS, read_dataset
from minisgl_jobs.model import JobState
from minisgl_jobs.queue import JobQueue
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.jobs.helpers import wait_for
from tests.jobs.own_server import OwnServer
from tests.processes import Command
from tests.workers.echo_group import MODEL, start_echo_group
from tests.workers.echo_rank import EchoConfig
from tests.workers.reading import Reader

READY_S = 60.0
END_S = 90.0
NUM_TOKENS = 8


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    with OwnServer(tmp_path_factory.mktemp("redis")) as own:
        yield own


def prompts(num_rows: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [100 + row]} for row in range(num_rows)]


def submit(api: Client, output: Path, num_rows: int, **options: int) -> JobHandle:
    return api.submit(
        prompts(num_rows), model=MODEL, output=output, token_ids=True, ignore_eos=True, max_tokens=NUM_TOKENS, **options
    )


def begun(log: Path) -> Counter[int]:
    """How often each row was begun."""
    return Counter(int(line.split()[1]) - 100 for line in log.read_text().splitlines()) if log.exists() else Counter()


def check_whole(job: JobHandle, output: Path, num_rows: int, lost: frozenset[int] = frozenset()) -> None:
    """Every row came out once, and right."""
    table = read_dataset(output)
    assert table["row_index"].to_pylist() == list(range(num_rows))
    good = [row for row in range(num_rows) if row not in lost]
    ids = table["output_token_ids"].to_pylist()
    assert [ids[row] for row in good] == [[100 + row] * NUM_TOKENS for row in good]
    errors = table["error_type"].to_pylist()
    assert {row for row in range(num_rows) if errors[row] is not None} == lost
    assert job.status().state is (JobState.PARTIAL if lost else JobState.FINISHED)
    assert (output / SUCCESS).exists()


def test_a_killed_workers_chunk_is_taken_over_within_the_lease_time_and_two_seconds(
    api: Client, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    lease_s = 2.0
    engine = EchoConfig(max_running=8, step_s=0.2, log=str(tmp_path / "log"))

    def start() -> Command:
        return start_echo_group(redis_server.url, engine=engine, lease_s=lease_s)

    with start() as first, start() as second:
        for command in (first, second):
            command.wait_for("serving", READY_S)
        assert {worker.drops_tools for worker in api.workers()} == {True}  # as the demo model's template does
        job = submit(api, tmp_path / "out", 16, chunk_rows=8)
        workers = wait_for("both to work", lambda: holders(job) if len(holders(job)) == 2 else None, 30)
        killed, left = min(workers), max(workers)
        pid = int(killed.split("-")[-2])
        (first if first.pid == pid else second).signal(signal.SIGKILL)
        died = time.monotonic()
        wait_for("the takeover", lambda: job.status().num_deaths == 1, lease_s + 10)
        assert time.monotonic() - died < lease_s + 2
        wait_for("the end", lambda: job.status().state.is_final, END_S)
        assert holders(job) <= {left}
        check_whole(job, tmp_path / "out", 16)


def holders(job: JobHandle) -> set[str]:
    return {lease.worker_id for lease in job.status().leases}


def test_an_outage_of_redis_longer_than_a_lease_loses_nothing_and_steals_no_chunk(
    server: OwnServer, tmp_path: Path
) -> None:
    """While idle, then in the middle of a job with a reader."""
    engine = EchoConfig(max_running=8, step_s=0.05, log=str(tmp_path / "log"))
    lease_s = 1.0
    with (
        start_echo_group(server.url, engine=engine, lease_s=lease_s) as first,
        start_echo_group(server.url, engine=engine, lease_s=lease_s) as second,
        Client(server.url) as api,
    ):
        for command in (first, second):
            command.wait_for("serving", READY_S)
        outage(server, 2 * lease_s)
        job = submit(api, tmp_path / "out", 120, chunk_rows=20)
        reader = Reader(server.url, job.id)
        wait_for("some rows", lambda: job.status().rows_done > 0, 30)
        outage(server, 2 * lease_s)
        wait_for("the end", lambda: job.status().state.is_final, END_S)
        check_whole(job, tmp_path / "out", 120)
        reader.check(tmp_path / "out", END_S)
        assert job.status().num_deaths == 0
        assert set(begun(tmp_path / "log").values()) == {1}
        for command in (first, second):
            command.signal(signal.SIGTERM)
            command.finish()


@pytest.mark.parametrize("loss", [pytest.param("power", marks=pytest.mark.full), "failover"])
def test_rows_that_redis_has_lost_are_generated_again_and_none_is_missing_or_twice(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, loss: str
) -> None:
    port = free_port()
    with (
        OwnServer(tmp_path_factory.mktemp("redis"), port) as server,
        OwnServer(tmp_path_factory.mktemp("redis"), free_port()) as replica,
        start_echo_group(server.url, engine=EchoConfig(max_running=8, step_s=0.03), lease_s=1.0) as command,
        Client(server.url) as api,
    ):
        command.wait_for("serving", READY_S)
        second = connect(replica.url)
        second.replicaof("127.0.0.1", port)
        job = submit(api, tmp_path / "out", 120, chunk_rows=20)
        wait_for("some rows", lambda: job.status().rows_done > 0, 30)
        wait_for("the replica to follow", lambda: second.info("replication")["master_link_status"] == "up", 30)
        if loss == "power":
            server.lose_power(3000)
            server.start()
        else:
            second.replicaof("no", "one")
            done = job.status().rows_done
            wait_for("writes that the replica lacks", lambda: job.status().rows_done > done, 30)
            server.kill()
            replica.take_place_of(server)
        wait_for("the end", lambda: job.status().state.is_final, END_S)
        check_whole(job, tmp_path / "out", 120)
        command.signal(signal.SIGTERM)
        command.finish()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def outage(server: OwnServer, length_s: float) -> None:
    server.kill()
    time.sleep(length_s)
    server.start()


def test_a_row_that_kills_its_worker_becomes_an_error_row_and_the_others_finish(
    api: Client, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    engine = EchoConfig(max_running=8, log=str(tmp_path / "log"), poison=105)
    with start_echo_group(redis_server.url, engine=engine, lease_s=0.8) as command:
        command.wait_for("serving", READY_S)
        job = submit(api, tmp_path / "out", 32, chunk_rows=16)
        wait_for("the end", lambda: job.status().state.is_final, END_S)
        check_whole(job, tmp_path / "out", 32, lost=frozenset({5}))
        command.signal(signal.SIGTERM)
        command.finish()
    row = read_dataset(tmp_path / "out").to_pylist()[5]
    assert (row["error_type"], row["text"]) == ("worker_lost", None)
    assert job.status().num_deaths == 4  # twice among others, and twice alone: a sixteenth of the chunk is one row
    assert begun(tmp_path / "log")[5] == 4


def test_a_drained_or_stopped_group_loses_nothing_and_no_finished_row_runs_again(
    api: Client, client: redis.Redis, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    engine = EchoConfig(max_running=4, step_s=0.06, log=str(log))
    job = submit(api, tmp_path / "out", 24, chunk_rows=24)
    finished: set[int] = set()
    for num_signals in (1, 2):
        with start_echo_group(redis_server.url, engine=engine, lease_s=1.0, drain_s=0.5) as command:
            command.wait_for("serving", READY_S)
            so_far = job.status().num_spooled
            wait_for("rows in the spool", lambda so_far=so_far: job.status().num_spooled > so_far, 30)
            command.signal(signal.SIGINT)
            if num_signals == 2:
                command.wait_for("a second signal stops at once")
                command.signal(signal.SIGINT)
            command.finish(timeout_s=10)
        assert not finished & {int(line.split()[1]) - 100 for line in log.read_text().splitlines()}
        finished |= {row for row, _ in JobQueue(client).spooled(job.id, 0)}
        log.unlink()
    assert job.status().num_deaths == 0
    with start_echo_group(redis_server.url, engine=engine, lease_s=1.0) as command:
        wait_for("the end", lambda: job.status().state.is_final, END_S)
        command.signal(signal.SIGTERM)
        command.finish()
    check_whole(job, tmp_path / "out", 24)
    assert set(begun(log)) == set(range(24)) - finished


def test_readers_see_every_token_once_whenever_they_come_however_slow_and_often_cut_off(
    api: Client, client: redis.Redis, redis_server: EmbeddedRedis, tmp_path: Path, rng: random.Random
) -> None:
    engine = EchoConfig(max_running=16, step_s=0.02)
    with start_echo_group(redis_server.url, engine=engine) as command:
        command.wait_for("serving", READY_S)
        job = submit(api, tmp_path / "out", 64, chunk_rows=16)
        readers = [Reader(redis_server.url, job.id), Reader(redis_server.url, job.id, pause_s=0.01)]
        for _ in range(20):
            time.sleep(rng.uniform(0, 0.1))
            client.client_kill_filter(_type="pubsub")
            if rng.random() < 0.2:
                readers.append(Reader(redis_server.url, job.id))
        wait_for("the end", lambda: job.status().state.is_final, END_S)
        readers.append(Reader(redis_server.url, job.id))
        for reader in readers:
            reader.check(tmp_path / "out", END_S)
        check_whole(job, tmp_path / "out", 64)


def test_a_group_leaves_nothing_in_the_temporary_folder(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    with start_echo_group(redis_server.url, variables={"TMPDIR": str(tmp_path)}) as command:
        command.wait_for("serving", READY_S)
        assert os.listdir(tmp_path) != []
        command.signal(signal.SIGKILL)
        wait_for("the frontend to tidy up", lambda: os.listdir(tmp_path) == [], 20)


@pytest.mark.full  # tests/jobs/test_turns.py has the same of the queue alone
def test_a_small_job_starts_within_two_chunks_of_a_big_one(
    api: Client, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    chunk_rows = 32
    engine = EchoConfig(max_running=chunk_rows, step_s=0.02)
    with start_echo_group(redis_server.url, engine=engine) as command:
        command.wait_for("serving", READY_S)
        big = submit(api, tmp_path / "big", 900, chunk_rows=chunk_rows)
        wait_for("some rows", lambda: big.status().rows_done >= 3 * chunk_rows, 30)
        small = submit(api, tmp_path / "small", 20)
        for job in (small, big):
            wait_for("its end", lambda job=job: job.status().state.is_final, END_S)
    rows = read_dataset(tmp_path / "small").to_pylist()
    first = min(row["started_at"].timestamp() + row["ttft_ms"] / 1000 for row in rows)
    ends = [time.timestamp() for time in read_dataset(tmp_path / "big")["finished_at"].to_pylist()]
    assert sum(small.status().spec.submitted_at < end < first for end in ends) <= 2 * chunk_rows
