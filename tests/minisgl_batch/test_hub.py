"""Models and their revisions out of a hub cache that lies here; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from minisgl_batch import LLM
from minisgl_batch.config import EngineConfig
from minisgl_batch.errors import InvalidParameterError, ModelError, ModelNotFoundError, ModelUnavailableError
from minisgl_batch.hub import DEMO_MODEL, commit_of, fingerprint, folder_of, model_path
from minisgl_workers.options import WorkerOptions
from tests.minisgl_batch.hub_cache import HUB_ID, MAIN, OLD


@pytest.mark.parametrize(
    ("model", "revision", "commit"),
    [
        (HUB_ID, None, MAIN),
        (HUB_ID, "main", MAIN),
        (HUB_ID, "v1", OLD),
        (HUB_ID, OLD, OLD),
        (f"{HUB_ID}@v1", None, OLD),
    ],
)
def test_revisions(cache: Path, model: str, revision: str | None, commit: str) -> None:
    path = model_path(model, revision)
    assert (path.parent.parent, commit_of(path)) == (cache / "models--someone--demo", commit)
    options = WorkerOptions(engine=EngineConfig(model=model, revision=revision), redis_url="redis://x")
    fetched = options.fetched()
    assert fetched.model == options.model == model  # what jobs call it
    assert fetched.engine == fetched.fetched().engine == EngineConfig(model=str(path))


def test_a_fingerprint_tells_replaced_files_from_the_same_in_another_place(tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(model_path(DEMO_MODEL), here)
    first = fingerprint(here)
    assert first == fingerprint(model_path(DEMO_MODEL))
    weights = here / "model.safetensors"
    trained = bytearray(weights.read_bytes())
    trained[-(len(trained) // 4) :] = os.urandom(len(trained) // 4)  # the header and the size stay
    weights.write_bytes(trained)
    second = fingerprint(here)
    (here / "chat_template.jinja").write_text("other")
    assert len({first, second, fingerprint(here)}) == 3


def test_a_fingerprint_passes_over_what_is_no_file_and_reads_no_large_text(tmp_path: Path) -> None:
    shutil.copytree(model_path(DEMO_MODEL), tmp_path, dirs_exist_ok=True)
    first = fingerprint(tmp_path)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    assert fingerprint(tmp_path) == first
    with (tmp_path / "corpus.txt").open("wb") as file:
        file.truncate(1 << 40)  # more than any memory
    assert fingerprint(tmp_path) != first


def test_weights_that_lie_there_twice_are_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    wanted = ["config.json", "model.safetensors", "chat_template.jinja"]
    others = ["original/model.safetensors", "original/config.json", "metal/model.bin", "consolidated.safetensors"]
    taken: list[str] = []

    def download(_: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_options: object) -> str:
        taken.extend(
            filter_repo_objects([*wanted, *others], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model_path("someone/model")
    assert taken == wanted


@pytest.mark.usefixtures("cache")
def test_an_engine_says_what_it_runs() -> None:
    with LLM(HUB_ID, revision="v1", device="cpu") as llm:
        assert llm.max_seq_len == llm.tokenizer.max_len == 128
        assert llm._engine.ready.description["revision"] == OLD


def test_what_has_no_revision(cache: Path) -> None:
    folder = cache / "models--someone--demo" / "snapshots" / MAIN
    for model in (DEMO_MODEL, str(folder)):
        assert folder_of(model, None) == model
        with pytest.raises(InvalidParameterError, match=r"revision: .* is no hub id, and nothing else has revisions"):
            model_path(model, "main")
    with pytest.raises(ModelNotFoundError, match="demo is no hub id, and nothing else has revisions"):
        model_path(f"{DEMO_MODEL}@main")
    with pytest.raises(ModelNotFoundError, match="must follow the @"):
        model_path("someone/demo@")
    with pytest.raises(InvalidParameterError, match="revision: 'someone/demo@v1' names one, too"):
        model_path(f"{HUB_ID}@v1", "main")
    with pytest.raises(InvalidParameterError, match="revision: must be a branch, tag or commit, got ''"):
        EngineConfig(model=HUB_ID, revision="")


def test_a_hub_out_of_reach_is_told_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **_options: object) -> str:
        raise LocalEntryNotFoundError("Got: ConnectError\nCheck it") from OSError("Connection\n  refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelUnavailableError) as caught:
        model_path(HUB_ID)
    assert "it is no folder here: Connection refused; check the network" in str(caught.value)
    assert "HF_HUB_OFFLINE=1" in str(caught.value)


def test_offline_errors_say_what_to_set(cache: Path) -> None:
    for model, revision in ((HUB_ID, "v2"), ("someone/else", None)):
        with pytest.raises(ModelUnavailableError) as caught:
            model_path(model, revision)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"model {model!r}" + (f" at revision {revision!r} is" if revision else " is"))
        assert f"cache {cache}, and HF_HUB_OFFLINE is set: unset it" in line
    (cache / "models--someone--demo" / "snapshots" / MAIN / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no .*safetensors"), LLM(HUB_ID):
        pass
