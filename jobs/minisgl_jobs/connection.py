"""Opens connections to Redis or Valkey by URL, with time limits everywhere, and says clearly why one can't be had.

Knows nothing of jobs. Called by clients, worker groups and the command line; everything else is given the connection.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from minisgl_batch.errors import RedisUnavailableError, UsageError

SOCKET_TIMEOUT_S = 10.0  # longest wait for a piece of an answer; blocking reads stay well below it
MIN_VERSION = (6, 2)

_PLAIN = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_SENTINEL = {"redis+sentinel": False, "rediss+sentinel": True, "valkey+sentinel": False, "valkeys+sentinel": True}
_FORMS = "redis://, rediss://, unix:// or redis+sentinel://host:port,host:port/service/db"


def connect(url: str) -> redis.Redis:
    """Connect and check the server; commands that meet a short outage are repeated for about a second.

    Args:
        url: redis:// or rediss:// (TLS) `[user:password@]host[:port][/db]`, unix:///path/to/socket, or
            redis+sentinel:// `[user:password@]host:port[,host:port...]/service[/db]`; valkey spellings too.

    Returns:
        A client that answers with bytes; share it between threads, not between processes.

    Raises:
        UsageError: the URL has another form.
        RedisUnavailableError: the server can't be reached, refuses the login, or is older than 6.2.
    """
    try:
        with _client(url, retries=0) as probe:  # a typing mistake in the URL is told at once
            version = str(probe.info("server")["redis_version"])
    except (AuthenticationError, NoPermissionError) as error:
        raise RedisUnavailableError(
            f"Redis at {safe_url(url)} refuses the login or the command INFO: check user, password and ACL ({error})"
        ) from None
    except MasterNotFoundError:
        raise RedisUnavailableError(f"no Sentinel at {safe_url(url)} knows a master of that service") from None
    except RedisError as error:
        raise RedisUnavailableError(f"Redis at {safe_url(url)} can't be reached: {error}") from None
    except UnicodeError:
        raise _not_a_url(url) from None  # such a host can't have an address
    if tuple(int(number) for number in version.split(".")[:2]) < MIN_VERSION:
        raise RedisUnavailableError(f"Redis at {safe_url(url)} is version {version}: 6.2 or newer is needed")
    return _client(url, retries=3)


def safe_url(url: str) -> str:
    """The URL for messages and logs: without user, password and options."""
    return re.sub(r"//.*@", "//", url).split("?")[0]


def _client(url: str, *, retries: int) -> redis.Redis:
    scheme = url.partition("://")[0]
    try:
        if scheme in _SENTINEL:
            return _sentinel_client(url, _options(retries), tls=_SENTINEL[scheme])
        if scheme in _PLAIN:
            options = _options(retries) | ({} if scheme == "unix" else {"socket_keepalive": True})
            return redis.Redis.from_url(_PLAIN[scheme] + url[len(scheme) :], **options)
    except (ValueError, TypeError):
        pass  # the original message may quote a password
    raise _not_a_url(url)


def _not_a_url(url: str) -> UsageError:
    return UsageError(f"{safe_url(url)!r} is not a Redis URL: give {_FORMS}; write special characters as %XX")


def _sentinel_client(url: str, options: dict[str, Any], *, tls: bool) -> redis.Redis:
    parts = urlsplit(url)
    userinfo, _, netloc = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    hosts = [host.rpartition(":") for host in netloc.split(",")]
    service, _, db = parts.path.strip("/").partition("/")
    if not service or not all(name for name, _, _ in hosts):
        raise ValueError(url)
    login = {key: unquote(value) for key, value in (("username", user), ("password", password)) if value}
    options = {**options, **login, "socket_keepalive": True, "db": int(db or 0)}
    if tls:
        options["ssl"] = True
        options.update((name, values[-1]) for name, values in parse_qs(parts.query).items() if name.startswith("ssl_"))
    addresses = [(name.strip("[]"), int(port)) for name, _, port in hosts]
    sentinel_options = {key: value for key, value in options.items() if key not in ("db", "username", "password")}
    make: Any = Sentinel  # untyped in the library
    client: redis.Redis = make(addresses, sentinel_kwargs=sentinel_options, **options).master_for(service)
    return client


def _options(retries: int) -> dict[str, Any]:
    return {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": 5.0,
        "health_check_interval": 30,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
        "protocol": 2,  # one shape of replies with every version of the client library
        "decode_responses": False,
    }
