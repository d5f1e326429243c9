"""A hub cache with two commits of one model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from minisgl_batch.hub import DEMO_MODEL, model_path

MAIN, OLD = "a" * 40, "b" * 40
HUB_ID = "someone/demo"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits of the demo model, the older of which has a shorter context, while offline."""
    repo = tmp_path / "models--someone--demo"
    for commit, name in ((MAIN, "main"), (OLD, "v1")):
        shutil.copytree(model_path(DEMO_MODEL), repo / "snapshots" / commit)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / name).write_text(commit)
    config = json.loads((repo / "snapshots" / OLD / "config.json").read_text())
    (repo / "snapshots" / OLD / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path
