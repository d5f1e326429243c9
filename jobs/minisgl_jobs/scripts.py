"""Loads the Lua scripts and runs them: one atomic step of the protocol each.

A script's source is the key names (keys.py), the shared prelude and its own file. Registered scripts reload themselves
after Redis has restarted. Knows nothing of what the scripts mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

import redis
from redis import exceptions

from minisgl_batch.errors import DamagedJobError, RedisFullError, RedisUnavailableError
from minisgl_jobs.keys import lua_names

_DAMAGE = ("WRONGTYPE", "not an integer", "not a valid float", "bit offset", "attempt to", "bad argument", "Expected ")


@cache
def source(name: str) -> str:
    """The whole Lua source of a script."""
    folder = files("minisgl_jobs") / "lua"
    parts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name)]
    return "\n".join([lua_names(), *parts])


class Scripts:
    """The scripts on one connection."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._registered: dict[str, Any] = {}

    def run(self, name: str, prefix: str, *args: str | bytes | int | float) -> Any:
        """Run a script on the queue whose keys begin with `prefix`.

        Raises:
            RedisFullError: Redis has no room for what the script would add; nothing was changed.
            RedisUnavailableError: Redis stayed away; the step may or may not have happened, and may be repeated.
            DamagedJobError: the records that it met are not ours.
        """
        script = self._registered.get(name)
        if script is None:
            script = self._registered[name] = self._client.register_script(source(name))
        with redis_errors():
            return script(keys=[prefix], args=args)


@contextmanager
def redis_errors() -> Iterator[None]:
    """Raise the client library's errors as ours.

    Raises:
        RedisFullError: out of memory, or Redis can't write its own files.
        RedisUnavailableError: Redis can't be reached, or is a replica at the moment (a failover).
        DamagedJobError: a key holds a value of another kind than this package put there.
    """
    try:
        yield
    except (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError) as error:
        raise RedisUnavailableError(f"Redis is away: {error}") from error
    except exceptions.OutOfMemoryError as error:
        raise RedisFullError(f"Redis takes no more data: {error}") from error
    except exceptions.ResponseError as error:
        # Redis 6 puts the code of an error that a script met into the middle of the message.
        text = str(error)
        if "OOM command not allowed" in text or "MISCONF" in text:
            raise RedisFullError(f"Redis takes no more data: {text}") from error
        if "READONLY" in text:
            raise RedisUnavailableError(f"Redis is away: {text}") from error
        if any(sign in text for sign in _DAMAGE):
            raise DamagedJobError(f"Redis holds what minisgl-batch didn't write: {text}") from error
        raise
