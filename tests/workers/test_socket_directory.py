"""The directory of a group's sockets: private, short, and not left behind by anybody."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from minisgl_workers.socket_directory import socket_directory


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_removed(base: Path) -> None:
    with socket_directory() as folder:
        assert folder.parent == base
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "frontend").touch()
    assert os.listdir(base) == []


def test_what_a_killed_worker_left_is_removed_and_nothing_else(base: Path) -> None:
    left = base / "minisgl-group-left"
    for folder in (left, base / "minisgl-group-new", base / "other"):
        folder.mkdir()
    (base / "minisgl-group-file").touch()
    (left / "lock").touch()
    (left / "rank0").touch()
    with socket_directory() as used, socket_directory() as other:
        names = {"minisgl-group-new", "minisgl-group-file", "other", used.name, other.name}
        assert set(os.listdir(base)) == names


def test_a_long_base_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    with socket_directory() as folder:
        assert len(str(folder / "frontend")) < 100
