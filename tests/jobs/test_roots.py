"""What lies under the roots of a shared worker, however it is spelled."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_batch.errors import InputUnreachableError, InvalidParameterError, OutputNotAllowedError
from minisgl_jobs.places import Place, RemotePath, place
from minisgl_jobs.roots import VARIABLE, AllowedRoots


class _Url(RemotePath):
    """A URL that isn't opened."""

    def __init__(self, url: str) -> None:
        super().__init__(url, self)

    @staticmethod
    def _strip_protocol(url: str) -> str:
        return url


def allows(roots: AllowedRoots, path: Place | str) -> bool:
    try:
        roots.check_reading(path)
        roots.check_writing(path)
    except (InputUnreachableError, OutputNotAllowedError):
        return False
    return True


def test_without_roots_everything_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for roots in (AllowedRoots(), AllowedRoots.of_environment()):
        assert allows(roots, tmp_path)
        assert allows(roots, _Url("s3://any/where"))


def test_local_names_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside, other = tmp_path / "in", tmp_path / "out", tmp_path / "in-no-more"
    for folder in (inside, outside, other):
        folder.mkdir()
    (inside / "away").symlink_to(outside)
    (inside / "here").symlink_to(inside / "deep")
    (outside / "back").symlink_to(inside)
    (outside / "root").symlink_to(inside)
    monkeypatch.setenv(VARIABLE, f"{outside / 'root'};s3://bucket/prefix")
    for roots in (AllowedRoots([str(inside)]), AllowedRoots([inside.as_uri()]), AllowedRoots.of_environment()):
        for path in ("in", "in/x", "in/here/x", "out/back/x", "in/../in/x", "out/../in"):
            assert allows(roots, tmp_path / path), path
            assert allows(roots, str(tmp_path / path)), path
            assert allows(roots, f"file://{tmp_path}/{path}"), path
        for path in ("", "out", "in/away/x", "in/../out", "in-no-more/x", "in/here/../../out/x", "in/away/../x"):
            assert not allows(roots, tmp_path / path), path
            opened = place(str(tmp_path / path))  # which takes `..` out of a text first
            assert allows(roots, str(tmp_path / path)) == allows(roots, opened), path
            assert allows(roots, f"file://{tmp_path}/{path}") == allows(roots, opened), path
        for name in ("", "a\0b", "file://host/x", "file://[x"):
            assert not allows(roots, name), name
    assert not allows(AllowedRoots(["s3://bucket"]), inside)


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("s3://bucket/prefix", True),
        ("s3://bucket/prefix/a/b", True),
        ("S3://bucket/prefix/a", True),
        ("s3://bucket/prefix-2/a", False),
        ("s3://bucket/other", False),
        ("s3://bucket", False),
        ("s3://bucket2/prefix", False),
        ("gs://bucket/prefix/a", False),
        ("s3://bucket/prefix/../other", False),
        ("s3://bucket/prefix/%2e%2e/other", False),
        ("s3://bucket/prefix//a", False),
        ("s3://bucket/prefix/a?endpoint_override=evil", False),
        ("s3://bucket/prefix/a::file:///etc", False),
        ("filecache::s3://bucket/prefix/a", False),
        ("gcs://else/x/y", True),
    ],
)
def test_urls(url: str, is_allowed: bool) -> None:
    roots = AllowedRoots(["s3://bucket/prefix/", "gs://else/x"])
    assert allows(roots, _Url(url)) == allows(roots, url) == is_allowed


def test_a_refusal_tells_no_password() -> None:
    with pytest.raises(InputUnreachableError, match=r"^ftp://host/x may not be read") as error:
        AllowedRoots(["s3://bucket"]).check_reading("ftp://user:secret@host/x?key=secret")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("root", ["", "s3://", "s3://a/../b", "s3://a?b", "file://host/x", "a\0b"])
def test_roots_that_are_none(root: str) -> None:
    with pytest.raises(InvalidParameterError, match="allow_roots"):
        AllowedRoots([root])
