"""Where the ranks of a group meet: a small store of keys that all see, and the address that others reach this host at.

Used once, when a group comes together. Knows nothing of what is exchanged.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.errors import InvalidParameterError

JOIN_TIMEOUT_S = 600.0  # ranks on a busy machine take long to import torch; ranks on other hosts are started by hand


def open_store(place: RankPlace) -> Store:
    """The group's store; a group's `meet` is used once.

    Raises:
        InvalidParameterError: `meet` is no such address.
    """
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    url = urlsplit(place.meet)
    if url.scheme == "file":
        store = FileStore(url.path, place.size)
        store.set_timeout(timeout)
        return store
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise InvalidParameterError("rendezvous", f"{place.meet!r} is no address; give HOST:PORT")
    try:
        return TCPStore(url.hostname, url.port, place.size, is_master=place.rank == 0, timeout=timeout)
    except (dist.DistError, OSError) as error:
        doing = "listen on" if place.rank == 0 else "reach rank 0 at"
        raise InvalidParameterError("rendezvous", f"can't {doing} {url.hostname}:{url.port}: {error}") from error


def shared_folder(place: RankPlace) -> Path | None:
    """The private folder of a group whose ranks are all on this host; None for groups over several hosts."""
    url = urlsplit(place.meet)
    return Path(url.path).parent if url.scheme == "file" else None


def own_address(place: RankPlace) -> str:
    """The IP address that the other ranks reach this host at: that of the interface that leads to where they meet."""
    if shared_folder(place) is not None:
        return "127.0.0.1"
    url = urlsplit(place.meet)
    family, kind, protocol, _, address = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        own: str = probe.getsockname()[0]
    return own
