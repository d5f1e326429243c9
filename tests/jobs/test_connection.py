"""URLs, old servers, refused logins; and no password in any message."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.sentinel import SentinelConnectionPool
from rq.job import JobStatus

from minisgl_batch.client import Client
from minisgl_batch.errors import RedisUnavailableError, UsageError
from minisgl_jobs import connection
from minisgl_jobs.connection import connect, safe_url
from minisgl_jobs.keys import queue_name
from minisgl_jobs.model import JobState
from minisgl_jobs.tasks import START, AllowListJob, make_task_worker, task_queue
from minisgl_workers.embedded_redis import EmbeddedRedis, find_server
from tests.jobs.helpers import wait_for
from tests.jobs.tcp_server import can_connect, encrypted, free_port, make_certificate, running
from tests.minisgl_batch.echo_worker import MODEL as ECHO
from tests.minisgl_batch.echo_worker import EchoWorker

SECRET = "s3cr3t"
RIGHTS = "resetchannels ~mb:* ~rq:* &mb:* &rq:* +@all -@dangerous -@admin +info +client|setname +client|list"


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost", "http://localhost", "redis:/x", f"redis://:{SECRET}@host:port/0"),
        *(f"redis://:{SECRET}/x@host:6379", f"redis://u:{SECRET}?@host:x", f"redis://u:{SECRET}@host/0?db=x"),
        *("redis+sentinel://host:26379", f"redis+sentinel://:{SECRET}@host/service", "redis+sentinel:///service"),
        *("redis+sentinel://host:26379/service/x", f"redis+sentinel://u:{SECRET}@host:26379,b:x/service"),
    ],
)
def test_odd_urls_are_refused_without_telling_the_password(url: str) -> None:
    with pytest.raises(UsageError, match="not a Redis URL") as error:
        connect(url)
    assert SECRET not in str(error.value)
    assert error.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("redis://u:p@host:1/2", "redis://host:1/2"),
        ("rediss://:a@b/c@host?password=p", "rediss://host"),
        ("unix://u@/tmp/s?password=p&db=1", "unix:///tmp/s"),
        ("redis+sentinel://:p@a:1,b:2/s/0", "redis+sentinel://a:1,b:2/s/0"),
    ],
)
def test_safe_urls(url: str, safe: str) -> None:
    assert safe_url(url) == safe


def test_unix_sockets_and_databases(redis_server: EmbeddedRedis, client: redis.Redis) -> None:
    other = connect(f"{redis_server.url}?db=3")
    other.set("a", "b")
    assert client.get("a") is None
    assert connect(f"{redis_server.url}?db=3").get("a") == b"b"
    other.flushdb()


def test_a_server_that_does_not_answer_is_reported_soon() -> None:
    started = time.monotonic()
    for url in (f"redis://:{SECRET}@127.0.0.1:{free_port()}", f"unix:///nowhere/socket?password={SECRET}"):
        with pytest.raises(RedisUnavailableError, match="can't be reached") as error:
            connect(url)
        assert SECRET not in str(error.value)
    assert time.monotonic() - started < 20


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RedisUnavailableError, match="can't be reached"):
            connect(f"redis://127.0.0.1:{port}")


def test_passwords_and_tcp() -> None:
    with running("--requirepass", SECRET) as port:
        assert connect(f"redis://:{SECRET}@127.0.0.1:{port}/1").ping()
        assert connect(f"valkey://default:{SECRET}@127.0.0.1:{port}").ping()
        for url in (f"redis://127.0.0.1:{port}", f"redis://:wrong-{SECRET}@127.0.0.1:{port}"):
            with pytest.raises(RedisUnavailableError, match="login") as error:
                connect(url)
            assert SECRET not in str(error.value)


def test_a_user_without_rights_is_told_what_to_check(redis_server: EmbeddedRedis, client: redis.Redis) -> None:
    client.acl_setuser("meek", enabled=True, passwords=[f"+{SECRET}"], commands=["+ping"])
    try:
        with pytest.raises(RedisUnavailableError, match="INFO"):
            connect(f"{redis_server.url}?username=meek&password={SECRET}")
    finally:
        client.acl_deluser("meek")


@contextmanager
def claiming(version: str) -> Iterator[int]:
    """The port of something that says it is a Redis of this version."""
    info = f"# Server\r\nredis_version:{version}\r\n"
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(5)
            while data := peer.recv(4096):
                for command in data.split(b"*")[1:]:
                    name = command.split(b"\r\n")[2]
                    answer = f"${len(info)}\r\n{info}\r\n" if name == b"INFO" else "+PONG\r\n"
                    peer.sendall(answer.encode())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(10)
        listener.close()


@pytest.mark.parametrize("version", ["6.0.16", "5.0", "2.8.19"])
def test_an_old_server_is_refused(version: str) -> None:
    with claiming(version) as port, pytest.raises(RedisUnavailableError, match=rf"is version {version}: 6\.2 or newer"):
        connect(f"redis://127.0.0.1:{port}")


def test_sentinel_finds_the_master(tmp_path: Path) -> None:
    with running("--requirepass", SECRET) as port:
        config = tmp_path / "sentinel.conf"
        sentinel_port = free_port()
        config.write_text(
            f"port {sentinel_port}\nbind 127.0.0.1\nsentinel monitor mymaster 127.0.0.1 {port} 1\n"
            f"sentinel auth-pass mymaster {SECRET}\n"
        )
        sentinel = subprocess.Popen([find_server(), config, "--sentinel"], stdout=subprocess.DEVNULL)
        try:
            wait_for("the sentinel", lambda: can_connect(sentinel_port))
            url = f"redis+sentinel://:{SECRET}@127.0.0.1:1,127.0.0.1:{sentinel_port}/mymaster/2"
            client: Any = connect(url)
            assert isinstance(client.connection_pool, SentinelConnectionPool)
            client.set("a", "b")
            assert connect(f"redis://:{SECRET}@127.0.0.1:{port}/2").get("a") == b"b"
            with pytest.raises(RedisUnavailableError, match="no Sentinel"):
                connect(f"redis+sentinel://127.0.0.1:{sentinel_port}/another")
        finally:
            sentinel.terminate()
            sentinel.wait(10)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_encrypted_connections(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with running("--requirepass", SECRET) as plain, encrypted(plain, certificate, key) as port:
        url = f"rediss://:{SECRET}@127.0.0.1:{port}/1"
        client = connect(f"{url}?ssl_ca_certs={certificate}")
        client.set("a", "b")
        assert connect(f"redis://:{SECRET}@127.0.0.1:{plain}/1").get("a") == b"b"
        for untrusted in (url, f"{url}?ssl_ca_certs={certificate}".replace("127.0.0.1", "localhost")):
            with pytest.raises(RedisUnavailableError, match=r"can't be reached.*certificate verify failed") as error:
                connect(untrusted)
            assert SECRET not in str(error.value)
        client.close()


def test_a_user_with_few_rights_can_submit_and_serve(tmp_path: Path) -> None:
    """Those that the documentation gives: the service's own keys and channels, and no dangerous command but INFO."""
    with running("--requirepass", SECRET) as port:
        admin = redis.Redis(port=port, password=SECRET)
        admin.execute_command("ACL", "SETUSER", "mini", "reset", "on", f">{SECRET}", *RIGHTS.split())
        url = f"redis://mini:{SECRET}@127.0.0.1:{port}"
        with Client(url) as submitter, EchoWorker(connect(url)):
            job = submitter.submit(["a", "b"], model=ECHO, output=tmp_path / "out")
            events = list(job.stream())
            assert job.wait(30).state is JobState.FINISHED
            assert {type(event).__name__ for event in events} >= {"RowStarted", "RowFinished", "JobChanged"}
        rq_client = connect(url)
        tasks = task_queue(rq_client, queue_name(ECHO))
        tasks.enqueue_call(START, args=(queue_name(ECHO), "no-such-job"), job_id="t", result_ttl=60)
        make_task_worker(rq_client, [queue_name(ECHO)], "limited").work(burst=True, logging_level="ERROR")
        assert AllowListJob.fetch("t", connection=rq_client).get_status() == JobStatus.FINISHED
        with pytest.raises(redis.exceptions.NoPermissionError):
            rq_client.get("another")
        admin.close()
