"""What a shared worker may read and write: only what lies under the folders and URLs that it was started with.

Local names are resolved first, so that neither `..` nor a symbolic link leads out. URLs are judged by their text, and
before a store is made of them: that may connect to a host or open files. Knows nothing of jobs. Called by whoever is
about to open an input or an output that a job names.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from minisgl_batch.errors import InputUnreachableError, InvalidParameterError, OutputNotAllowedError, UsageError
from minisgl_jobs.places import Place, place
from minisgl_jobs.stores import safe_name, url_scheme, without_login

VARIABLE = "MINISGL_ALLOW_ROOT"
SEPARATOR = ";"


class AllowedRoots:
    """The folders and URLs under which everything is allowed; without any, everything is.

    Attributes:
        is_confined: whether there are any.
    """

    def __init__(self, roots: Sequence[str] = ()) -> None:
        """
        Args:
            roots: local folders, and URLs such as s3://bucket/prefix.

        Raises:
            InvalidParameterError: one is neither.
        """
        self.is_confined = bool(roots)
        self._folders: list[str] = []
        self._urls: list[str] = []
        for root in roots:
            scheme = url_scheme(root)
            if scheme in ("", "file"):
                try:
                    self._folders.append(os.path.realpath(place(root)))  # type: ignore[arg-type]  # local
                except UsageError as error:
                    raise InvalidParameterError("allow_roots", str(error)) from None
            elif (url := _normal_url(root)) is None:
                raise InvalidParameterError("allow_roots", f"must be a folder or a plain URL, got {root!r}")
            else:
                self._urls.append(url)

    @classmethod
    def of_environment(cls) -> AllowedRoots:
        """Those in MINISGL_ALLOW_ROOT, as a worker group tells them to its RQ worker, whose tasks have no other way.

        Raises:
            InvalidParameterError: one is neither a folder nor a URL.
        """
        return cls([root for root in os.environ.get(VARIABLE, "").split(SEPARATOR) if root])

    def check_reading(self, path: Place | str) -> None:
        """Raise InputUnreachableError if an input may not be read."""
        if not self._allows(path):
            raise InputUnreachableError(
                f"{_shown(path)} may not be read by this worker, which was started with --allow-root"
            )

    def check_writing(self, folder: Place | str) -> None:
        """Raise OutputNotAllowedError if an output may not be written."""
        if not self._allows(folder):
            raise OutputNotAllowedError(
                f"{_shown(folder)} may not be written by this worker, which was started with --allow-root"
            )

    def _allows(self, path: Place | str) -> bool:
        if not self.is_confined:
            return True
        if isinstance(path, str) and url_scheme(path) in ("", "file"):
            try:
                path = place(path)
            except UsageError:
                return False
        if isinstance(path, Path):
            real = os.path.realpath(path)
            return any(real == root or real.startswith(root.rstrip("/") + "/") for root in self._folders)
        url = _normal_url(path if isinstance(path, str) else path.url)
        return url is not None and any(url == root or url.startswith(root + "/") for root in self._urls)


def _shown(path: Place | str) -> str:
    return without_login(safe_name(path)) if isinstance(path, str) else str(path)


def _normal_url(url: str) -> str | None:
    """The URL to be compared; None for one that a store might read in another way."""
    scheme = url_scheme(url)
    rest = url[len(scheme) + 3 :].rstrip("/")
    if not rest or any(sign in rest for sign in "?#\\") or "::" in url:
        return None
    for text in (rest, unquote(rest)):
        if posixpath.normpath(text) != text or text.startswith("/"):
            return None
    return f"{'gs' if scheme == 'gcs' else scheme}://{rest}"
