"""The embedded server: found, started once by racing processes, private or shared, and never left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from minisgl_batch.errors import RedisUnavailableError
from minisgl_jobs.connection import connect
from minisgl_jobs.own_server import default_data_dir
from minisgl_workers import embedded_redis
from minisgl_workers.embedded_redis import EmbeddedRedis, find_server
from minisgl_workers.redis_watchdog import answers

T = TypeVar("T")

USER = """
import sys, time
from pathlib import Path
from minisgl_workers.embedded_redis import EmbeddedRedis
server = EmbeddedRedis.shared(Path(sys.argv[1]))
print(server.url, flush=True)
sys.stdin.read()
server.close()
"""


def wait_for(what: str, check: Callable[[], T], timeout_s: float = 15.0) -> T:
    deadline = time.monotonic() + timeout_s
    while not (answer := check()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)
    return answer


def start_user(data_dir: Path) -> subprocess.Popen[str]:
    """Another process that uses the shared server until its standard input ends."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(data_dir)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(*users: subprocess.Popen[str]) -> None:
    for user in users:
        user.communicate(timeout=30)


def url_of(user: subprocess.Popen[str]) -> str:
    assert user.stdout is not None
    return user.stdout.readline().strip()


def server_pid(url: str) -> int:
    return int(connect(url).info("server")["process_id"])


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A zombie whose new parent hasn't looked yet is gone too.
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def watchdog_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_private_server_serves_and_leaves_nothing_behind() -> None:
    server = EmbeddedRedis.private()
    client = connect(server.url)
    config = {name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "maxmemory-policy", "port")}
    assert config == {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "port": "0",
    }
    assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
    pid = server_pid(server.url)
    server.close()
    server.close()
    assert is_gone(pid)
    assert not server.data_dir.exists()


def test_a_shared_server_keeps_its_data(tmp_path: Path) -> None:
    with EmbeddedRedis.shared(tmp_path / "data") as server:
        pid = server_pid(server.url)
        connect(server.url).set("a", "b")
    wait_for("the end of the server", lambda: is_gone(pid))
    with EmbeddedRedis.shared(tmp_path / "data") as server:
        assert connect(server.url).get("a") == b"b"


def test_a_server_may_be_used_again_while_it_ends(tmp_path: Path) -> None:
    def is_ending() -> bool:
        """Whether the watchdog has noticed that nobody is left (it may be done by now)."""
        if not answers(f"{tmp_path}/redis.sock"):
            return True
        with (tmp_path / "users.lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    for number in range(6):
        with EmbeddedRedis.shared(tmp_path) as server:
            assert connect(server.url).incr("n") == number + 1
        if number % 2:
            wait_for("the end to begin", is_ending)


def test_racing_processes_share_one_server_and_the_last_ends_it(tmp_path: Path) -> None:
    users = [start_user(tmp_path) for _ in range(5)]
    urls = {url_of(user) for user in users}
    assert len(urls) == 1
    url = urls.pop()
    pid = server_pid(url)
    end(*users[:4])
    assert server_pid(url) == pid
    end(users[4])
    wait_for("the end of the server", lambda: is_gone(pid))


def test_no_server_outlives_killed_users(tmp_path: Path) -> None:
    users = [start_user(tmp_path) for _ in range(2)]
    url = {url_of(user) for user in users}.pop()
    pid = server_pid(url)
    connect(url).set("a", "b")
    for user in users:
        user.kill()
    end(*users)
    wait_for("the end of the server", lambda: is_gone(pid))
    with EmbeddedRedis.shared(tmp_path) as server:
        assert connect(server.url).get("a") == b"b"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_no_server_outlives_a_killed_watchdog_and_it_can_be_had_again(tmp_path: Path) -> None:
    with EmbeddedRedis.shared(tmp_path) as server:
        pid = server_pid(server.url)
        os.kill(watchdog_pid(pid), signal.SIGKILL)
        wait_for("the end of the server", lambda: is_gone(pid))
        server.ensure_running()
        assert server_pid(server.url) != pid


def test_a_killed_server_comes_back_with_its_data(tmp_path: Path) -> None:
    with EmbeddedRedis.shared(tmp_path) as server:
        client = connect(server.url)
        client.set("a", "b")
        pid = server_pid(server.url)
        wait_for("the data on disk", lambda: client.info("persistence")["aof_pending_bio_fsync"] == 0)
        os.kill(pid, signal.SIGKILL)
        wait_for("the new server", lambda: answers(f"{tmp_path}/redis.sock"))
        assert connect(server.url).get("a") == b"b"


def test_forked_children_do_not_keep_a_closed_server(tmp_path: Path) -> None:
    server = EmbeddedRedis.shared(tmp_path)
    pid = server_pid(server.url)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        server.close()
        wait_for("the end of the server", lambda: is_gone(pid))
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    data_dir = tmp_path / ("x" * 60) / ("y" * 60)
    with EmbeddedRedis.shared(data_dir) as server:
        socket_path = Path(server.url.removeprefix("unix://"))
        assert len(str(socket_path)) <= 100
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        assert connect(server.url).ping()
        assert (data_dir / "redis.log").exists()


def test_a_short_socket_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    data_dir = tmp_path / ("x" * 60) / ("y" * 60)
    EmbeddedRedis.shared(data_dir).close()
    (folder,) = tmp_path.glob("minisgl-*")
    folder.chmod(0o777)
    with pytest.raises(RedisUnavailableError, match="somebody else"):
        EmbeddedRedis.shared(data_dir)


def test_a_path_with_blanks_and_signs(tmp_path: Path) -> None:
    with EmbeddedRedis.shared(tmp_path / "a b?c=d&é") as server:
        assert connect(server.url).ping()


def fake_server(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def test_servers_are_found_on_the_path_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    redis = fake_server(tmp_path / "bin", "redis-server", "Redis server v=7.0.15 sha=0")
    assert find_server() == redis
    valkey = fake_server(tmp_path / "bin", "valkey-server", "Valkey server v=8.1.0 sha=0")
    assert find_server() == valkey


def test_old_and_broken_servers_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    fake_server(tmp_path / "bin", "redis-server", "Redis server v=5.0.7 sha=0")
    fake_server(tmp_path / "bin", "valkey-server", "what?")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RedisUnavailableError, match=r"embedded.*--redis URL") as error:
        find_server()
    assert "5.0" in str(error.value)


def test_a_machine_without_a_server_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RedisUnavailableError, match=r"pip install 'minisgl-batch\[embedded\]'"):
        EmbeddedRedis.shared(tmp_path)


def test_a_server_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_text("this is no log of commands")
    (tmp_path / "appendonlydir").write_text("and this no folder")
    with pytest.raises(RedisUnavailableError, match=r"did not start.*redis\.log"):
        EmbeddedRedis.shared(tmp_path)


def test_the_data_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_data_dir() == Path("/state/minisgl-batch/redis")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_data_dir() == Path.home() / ".local/state/minisgl-batch/redis"


def test_a_lock_that_is_not_let_go_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(embedded_redis, "LOCK_TIMEOUT_S", 0.1)
    fd = os.open(tmp_path / "start.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(RedisUnavailableError, match=r"start\.lock"):
            EmbeddedRedis.shared(tmp_path)
    finally:
        os.close(fd)
