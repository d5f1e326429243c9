"""A Redis server on a port of the loopback, for tests of URLs, logins and encryption."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from minisgl_workers.embedded_redis import find_server
from tests.jobs.helpers import wait_for


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def can_connect(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running(*options: str) -> Iterator[int]:
    """A server on a port of the loopback."""
    port = free_port()
    # The port may be taken by another process meanwhile; nothing else listens on random high ports here.
    server = subprocess.Popen(
        [find_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", *options], stdout=subprocess.DEVNULL
    )
    try:
        wait_for("the server", lambda: can_connect(port))
        yield port
    finally:
        server.terminate()
        server.wait(10)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that signs itself for 127.0.0.1, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names, *files]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@contextmanager
def encrypted(port: int, certificate: Path, key: Path) -> Iterator[int]:
    """A port that speaks TLS before a server that doesn't, as a tunnel does: not every server is built with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                peer, _ = listener.accept()
                threading.Thread(target=tunnel, args=(peer,), daemon=True).start()

    def tunnel(peer: socket.socket) -> None:
        with suppress(OSError):  # a client that doesn't trust us, or goes away
            outside = context.wrap_socket(peer, server_side=True)
            inside = socket.create_connection(("127.0.0.1", port))
            pump = threading.Thread(target=_pump, args=(inside, outside), daemon=True)
            pump.start()
            _pump(outside, inside)

    accepting = threading.Thread(target=serve, daemon=True)
    accepting.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(10)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError), source, target:
        while data := source.recv(1 << 16):
            target.sendall(data)
