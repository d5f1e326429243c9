"""Which Redis a command talks to: the one it was given, else a server of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minisgl_batch.client import Client
from minisgl_workers.embedded_redis import EmbeddedRedis


@contextmanager
def open_redis(redis_url: str | None, *, private: bool = False) -> Iterator[str]:
    """The URL of a running Redis.

    Args:
        redis_url: what the user gave.
        private: without a URL, a server for this command alone; else the one that this user's commands share.

    Raises:
        RedisUnavailableError: no URL was given, and there is no server on this machine.
    """
    if redis_url:
        yield redis_url
        return
    with EmbeddedRedis.private() if private else EmbeddedRedis.shared() as server:
        yield server.url


@contextmanager
def open_client(redis_url: str | None, *, private: bool = False) -> Iterator[Client]:
    """A client of that Redis. Arguments and errors as `open_redis`, and those of `Client`."""
    with open_redis(redis_url, private=private) as url, Client(url) as client:
        yield client
