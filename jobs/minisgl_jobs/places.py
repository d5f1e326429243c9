"""Where inputs and outputs are: a local path, or a URL of an object store or anything else that fsspec reads.

`place` gives both the part of pathlib's interface that this package uses, so that parts, manifests and rows are read
and written by the same code. Failures are OSErrors whatever the store. Knows nothing of rows or datasets.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from minisgl_batch.errors import UsageError
from minisgl_jobs.stores import open_store, safe_name, url_scheme


class RemotePath:
    """A file or folder behind a URL; its methods do what those of `pathlib.Path` do.

    Credentials are those of this process's environment: a URL that holds some is refused, as jobs and manifests store
    URLs.

    Raises:
        UsageError: no installed package reads such URLs, or the URL holds a password.
    """

    def __init__(self, url: str, store: Any = None) -> None:
        self._url = url.rstrip("/")
        self._shown = safe_name(self._url)
        self._store = store or open_store(self._url)
        try:
            self._path: str = self._store._strip_protocol(self._url)
        except Exception as error:  # each store has its own
            raise UsageError(f"{self._shown} is no URL of such a store: {type(error).__name__}") from error

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"RemotePath({self._shown!r})"

    @property
    def url(self) -> str:
        """All of it, what messages and jobs leave out included."""
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}", self._store)

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._url.rpartition("/")[0], self._store)

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def exists(self) -> bool:
        with self._errors():
            return bool(self._store.exists(self._path))

    def is_file(self) -> bool:
        with self._errors():
            return bool(self._store.isfile(self._path))

    def is_dir(self) -> bool:
        """Whether something lies in it: object stores have no empty folders."""
        with self._errors():
            return bool(self._store.isdir(self._path))

    def names(self) -> list[str]:
        """What is in the folder; nothing if there is no such folder."""
        with self._errors():
            try:
                found = self._store.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        own = PurePosixPath(self._path).name
        names = (PurePosixPath(path).name for path in found if path.rstrip("/") != self._path.rstrip("/"))
        return [name for name in names if name and (name != own or len(found) > 1)]

    def files_below(self) -> list[str]:
        """All files of the folder and its folders, relative to it."""
        with self._errors():
            found: list[str] = self._store.find(self._path)
        base = self._path.rstrip("/") + "/"
        return [path.removeprefix(base) for path in found if path != self._path]

    def num_bytes(self) -> int:
        with self._errors():
            return int(self._store.info(self._path)["size"])

    def version(self) -> str:
        """What changes when the file's content does, as far as the store tells; "" when it tells nothing."""
        with self._errors():
            info = self._store.info(self._path)
        found = (info.get(name) for name in ("etag", "ETag", "blob_id", "mtime", "LastModified", "last_modified"))
        return str(next((value for value in found if value is not None), ""))

    def open(self, mode: str = "rb") -> io.RawIOBase:
        """Open it for reading."""
        if mode != "rb":
            raise ValueError("objects are written whole, by write_bytes")
        with self._errors():
            return cast(io.RawIOBase, _RemoteFile(self._store.open(self._path, "rb"), self))

    def read_bytes(self) -> bytes:
        with self._errors():
            return bytes(self._store.cat_file(self._path))

    def write_bytes(self, content: bytes) -> None:
        """Objects appear whole or not at all."""
        with self._errors():
            self._store.pipe_file(self._path, content)

    def replace(self, target: RemotePath) -> None:
        """Move it. Object stores have no rename: this copies inside the store, where a copy appears whole, and then
        removes the old object. May be repeated after a crash between the two."""
        try:
            with self._errors():
                self._store.cp_file(self._path, target._path)
        except FileNotFoundError:
            raise
        except OSError:
            if not self.exists():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._shown) from None
            raise
        self.unlink()

    def unlink(self) -> None:
        """Remove it; gone already is fine."""
        with self._errors():
            if self._store.exists(self._path):
                self._store.rm_file(self._path)

    def make_folder(self) -> None:
        """Nothing to do in an object store; elsewhere it is made."""
        with self._errors():
            self._store.makedirs(self._path, exist_ok=True)

    def rmdir(self) -> None:
        """Nothing to do: an object store has no empty folders."""

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Every failure as an OSError; each store has exceptions of its own."""
        try:
            self._store.invalidate_cache()  # listings that others have changed meanwhile
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._shown) from None
        except NotImplementedError as error:
            raise OSError(errno.EROFS, "this kind of store can't do that", self._shown) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = str(error).replace(self._url, self._shown)
            raise OSError(errno.EIO, f"{type(error).__name__}: {reason}", self._shown) from error


class _RemoteFile(io.RawIOBase):
    """A store's file whose failures are OSErrors."""

    def __init__(self, file: Any, path: RemotePath) -> None:
        self._file = file
        self._remote = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        with self._remote._errors():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


Place: TypeAlias = Path | RemotePath


def place(name: str | os.PathLike[str]) -> Place:
    """The absolute place that a path or URL names; `file://` is a local path.

    Raises:
        UsageError: it is no path, nothing installed reads such a URL, or it holds a password.
    """
    text = os.fspath(name)
    if not text or "\0" in text:
        raise UsageError(f"{text!r} is not a path")
    scheme = url_scheme(text)
    if scheme in ("", "file"):
        return Path(os.path.abspath(os.path.expanduser(_local_path(text) if scheme else text)))
    return RemotePath(text)


def list_names(folder: Place) -> list[str]:
    """The names in a folder, none if there is no such folder."""
    if isinstance(folder, RemotePath):
        return folder.names()
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def files_below(folder: Place) -> list[str]:
    """All files of a folder and its folders, relative to it, in the order of their names."""
    if isinstance(folder, RemotePath):
        return sorted(folder.files_below())
    found = [
        os.path.relpath(os.path.join(root, name), folder)
        for root, _, names in os.walk(folder, onerror=_raise)
        for name in names
    ]
    return sorted(found)


def open_binary(path: Place, *, pipes: bool = False) -> io.RawIOBase:
    """Open a file for reading, unbuffered.

    Args:
        pipes: whether it may be a local pipe or device, which may block until somebody writes.
    """
    if isinstance(path, RemotePath):
        return path.open()
    return open(path, "rb", buffering=0, opener=None if pipes else _open_regular)


def num_bytes(path: Place) -> int:
    """A file's size."""
    return path.num_bytes() if isinstance(path, RemotePath) else path.stat().st_size


def version(path: Place) -> str:
    """What changes when a file's content does: its time, or the store's tag."""
    return path.version() if isinstance(path, RemotePath) else str(path.stat().st_mtime_ns)


def make_folder(folder: Place) -> None:
    """Make a folder and those above it, where there are folders."""
    if isinstance(folder, RemotePath):
        folder.make_folder()
    else:
        folder.mkdir(parents=True, exist_ok=True)


def write_whole(path: Place, content: bytes, *, pending: Place | None = None) -> None:
    """Write a file so that on return it lasts through a power loss.

    Args:
        pending: a name beside it under which it is written first, so that it is there whole or not at all. Object
            stores need none.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    target = cast(Path, pending or path)
    try:
        with target.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if pending is not None:
            target.replace(path)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def move(source: Place, target: Place) -> None:
    """Give a file another name in its folder, in place of one that is there."""
    if isinstance(source, RemotePath):
        source.replace(cast(RemotePath, target))
    else:
        source.replace(cast(Path, target))
        sync_folder(source.parent)


def remove(path: Place) -> None:
    """Remove a file that may be gone already."""
    if isinstance(path, RemotePath):
        path.unlink()
    else:
        path.unlink(missing_ok=True)


def create(path: Place, content: bytes) -> None:
    """Make a file that isn't there yet; FileExistsError if it is. Object stores leave a gap between look and write."""
    if isinstance(path, RemotePath):
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        path.write_bytes(content)
        return
    with path.open("xb") as file:
        file.write(content)


def sync_folder(folder: Path) -> None:
    """Make a local folder's names (new files, renames) last through a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_regular(path: str, flags: int) -> int:
    """As os.open, but never waiting for the other end of a pipe. `open` itself refuses folders."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", path)


def _local_path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{url!r} is not a URL: {error}") from None
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"{url!r} names another machine: write file:///path/to/file")
    return unquote(parts.path)


def _raise(error: OSError) -> None:
    raise error
