"""Finds the client library for the store that a URL names: fsspec's own, or pyarrow's, which needs no other package.

Knows nothing of files. Called by `places.py`.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any
from urllib.parse import urlsplit

from minisgl_batch.errors import StoreUnavailableError, UsageError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_ARROW_SCHEMES = {"s3", "gs", "gcs"}  # pyarrow reads these without another package
_INSTALL = "pip install 'minisgl-batch[remote]'"
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_OF_NAMES = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EROFS),
)


def url_scheme(name: str) -> str:
    """The scheme of a URL in lower case, "" for a path."""
    match = _URL.match(name)
    return match[1].lower() if match else ""


def safe_name(name: str) -> str:
    """A path or URL for messages and jobs: a URL without what follows a question mark, which may be a signature."""
    return name.partition("?")[0] if url_scheme(name) else name


def without_login(url: str) -> str:
    """A URL for messages about one that may hold a password."""
    return re.sub(r"//.*@", "//", url)


def open_store(url: str) -> Any:
    """fsspec's object for the store that a URL is in.

    Raises:
        UsageError: no installed package reads such URLs, or the URL holds a password.
        StoreUnavailableError: the store doesn't answer.
    """
    scheme = url_scheme(url)
    try:
        netloc = urlsplit(url).netloc
    except ValueError as error:
        raise UsageError(f"{safe_name(url)} is not a URL: {error}") from None
    if "@" in netloc:
        raise UsageError(
            f"{without_login(url)} was given with a login, and jobs store URLs: set the login in the environment"
        )
    try:
        import fsspec
    except ImportError:
        raise UsageError(f"{scheme}:// needs fsspec: {_INSTALL}") from None
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError as error:
        if scheme not in _ARROW_SCHEMES:
            raise UsageError(f"{safe_name(url)} can't be used: {error}") from None
        try:
            return _arrow_store(scheme, url)
        except Exception as reason:
            raise _unusable(url, reason) from reason
    except Exception as error:  # there are dozens of stores, each with exceptions of its own
        raise _unusable(url, error) from error


def is_of_name(error: OSError) -> bool:
    """Whether it is the name that can't be used, while its store or disk works."""
    return error.errno in _OF_NAMES


def _unusable(url: str, error: Exception) -> UsageError:
    """What a store's constructor has raised, as ours."""
    kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
    raised = StoreUnavailableError if isinstance(error, OSError) and not is_of_name(error) else UsageError
    return raised(f"{safe_name(url)} can't be used: {kind}{error}".replace(url, safe_name(url)))


def _arrow_store(scheme: str, url: str) -> Any:
    """pyarrow's own client of the store, as fsspec has it."""
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import fs

    class _Store(ArrowFSWrapper):  # type: ignore[misc]  # fsspec is untyped
        cachable = False  # two stores of one class would be taken for the same

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(_URL.sub("", path, count=1))

        def cp_file(self, path1: str, path2: str, **_: Any) -> None:
            self.fs.copy_file(path1, path2)  # inside the store; fsspec's own reads and writes it

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            """Not needed: object stores have no folders."""

    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    region = next((os.environ[name] for name in _REGIONS if os.environ.get(name)), None)
    if scheme == "s3" and (endpoint or region):  # else the bucket's region is asked for
        return _Store(fs.S3FileSystem(endpoint_override=endpoint, region=region))
    return _Store(fs.FileSystem.from_uri(url.replace("gcs://", "gs://", 1))[0])
