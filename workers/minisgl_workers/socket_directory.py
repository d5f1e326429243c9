"""The private directory that holds the sockets of a worker group. Called by the supervisor."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "minisgl-group-"
_LOCK = "lock"
_MAX_PATH = 80  # a unix socket's whole path may have some 104 bytes


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A new directory of mode 0700, removed at the end. Removes those that killed supervisors have left, too."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _MAX_PATH:
        base = "/tmp"
    _sweep(Path(base))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_socket_directory(folder: Path) -> None:
    """For a process of the group whose supervisor was killed."""
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove our user's directories whose lock nobody holds; the kernel drops a dead process's locks."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or _is_in_use(folder):
                continue
        except (FileNotFoundError, NotADirectoryError):
            continue  # just made, or its owner has just removed it, or it is no such directory
        logger.info("removing %s, which a killed worker has left", folder)
        shutil.rmtree(folder, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    lock = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)
