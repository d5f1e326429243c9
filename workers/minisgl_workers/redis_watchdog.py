"""A small process of its own that keeps an embedded Redis server alive as long as somebody uses it.

Run as a script by `embedded_redis` with the standard library alone. Exits 0 once the server answers; a daemon stays
behind, restarts the server when it dies, and stops it (Redis saves its data then) as soon as no process holds a shared
lock on `users.lock` any more. The kernel drops such a lock however a process ends, so no server outlives its users.
Knows nothing of jobs or of who the users are.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

POLL_S = 0.1
START_TIMEOUT_S = 60.0  # a large append-only file takes a while to load
STOP_TIMEOUT_S = 30.0
MIN_LIFE_S = 1.0
MAX_EARLY_DEATHS = 5  # a server that dies within MIN_LIFE_S of its start so often in a row is given up
PR_SET_PDEATHSIG = 1


def answers(path: str) -> bool:
    """Whether a server that has loaded its data listens on the unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(2.0)
        try:
            sock.connect(path)
            sock.sendall(b"PING\r\n")
            return sock.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def command(server: str, data_dir: str, socket_path: str) -> list[str]:
    return [
        *(server, "--port", "0", "--unixsocket", socket_path, "--unixsocketperm", "700", "--daemonize", "no"),
        *("--dir", data_dir, "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--maxmemory-policy", "noeviction", "--logfile", os.path.join(data_dir, "redis.log")),
    ]


def die_with(watchdog: int) -> None:
    """On Linux the server gets a SIGTERM when this watchdog is killed; elsewhere it lives until it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != watchdog:  # killed before the line above
            os._exit(1)


def start(args: list[str], lock: int) -> subprocess.Popen[bytes]:
    """Start the server. It inherits `lock`, which so tells for certain whether a server still has the data open."""
    # The watchdog has one thread, so code between fork and exec is safe.
    return subprocess.Popen(args, pass_fds=(lock,), preexec_fn=functools.partial(die_with, os.getpid()))


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def try_lock(fd: int) -> bool:
    """Take an exclusive lock if nobody has one of any kind."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def guard(args: list[str], users: int, lock: int) -> None:
    """Keep the server running until there are no users."""
    num_early_deaths = 0
    while num_early_deaths < MAX_EARLY_DEATHS:
        started = time.monotonic()
        server = start(args, lock)
        while server.poll() is None:
            if stopping or try_lock(users):
                stop(server)
                return
            time.sleep(POLL_S)
        num_early_deaths = num_early_deaths + 1 if time.monotonic() - started < MIN_LIFE_S else 0
        time.sleep(num_early_deaths * POLL_S)


def await_server(daemon: int, socket_path: str) -> bool:
    """Wait until the server answers; False when the daemon gave up or the time is over."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if answers(socket_path):
            return True
        if os.waitpid(daemon, os.WNOHANG)[0]:
            return False
        time.sleep(POLL_S / 10)
    return False


stopping: list[int] = []


def main(server: str, data_dir: str, socket_path: str, remove: str) -> int:
    users = os.open(os.path.join(data_dir, "users.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    lock = os.open(os.path.join(data_dir, "server.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not try_lock(lock):
        if time.monotonic() > deadline:
            return 1  # another server has the data open and does not end
        time.sleep(POLL_S / 2)
    daemon = os.fork()
    if daemon:
        return 0 if await_server(daemon, socket_path) else 1
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):  # the caller may wait for the end of a pipe
        os.dup2(null, standard)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: stopping.append(number))
    guard(command(server, data_dir, socket_path), users, lock)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket_path)
    if remove == "remove":
        shutil.rmtree(data_dir, ignore_errors=True)
    return 0


if __name__ == "__main__":
    # os._exit: the forked daemon must not run exit handlers of its parent.
    os._exit(main(*sys.argv[1:]))
