"""Two hosts that a network connects, as network namespaces of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

import pytest


class TwoHosts:
    """Use as a context manager; skips the test where namespaces can't be made.

    Attributes:
        addresses: of both hosts.
    """

    def __init__(self) -> None:
        number = os.getpid() % 60_000
        self._names = [f"mb{number}a", f"mb{number}b"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def prefix(self, host: int) -> list[str]:
        """What runs a command on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def __enter__(self) -> TwoHosts:
        if shutil.which("ip") is None:
            pytest.skip("needs the ip command")
        try:
            for name in self._names:
                _ip("netns", "add", name)
            first, second = self._names
            _ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
            for name, address in zip(self._names, self.addresses, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
                _ip("-n", name, "link", "set", name, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            self.__exit__(None, None, None)
            pytest.skip(f"network namespaces can't be made here: {error.stderr.strip()}")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)
