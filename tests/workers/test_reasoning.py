"""Reasoning from a row's text to its readers and its result, through a whole worker group."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_batch.client import Client
from minisgl_batch.hub import model_path
from minisgl_batch.tokenizer import ModelTokenizer
from minisgl_jobs.row_texts import RowText
from minisgl_workers.embedded_redis import EmbeddedRedis
from tests.processes import Command
from tests.workers.echo_group import MODEL, start_echo_group
from tests.workers.echo_rank import EchoConfig

TEXTS = ["<think>\nhm, stop\n</think>\n\n42 stop here", "plain", "<think>hm"]


@pytest.mark.usefixtures("client")
def test_reasoning_is_split_off_for_readers_and_results(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    """The group echoes its prompts."""
    tokenizer = ModelTokenizer.load(model_path("demo", weights=False))
    rows = [{"prompt": text, "max_tokens": len(tokenizer.encode_prompt(text))} for text in TEXTS]
    folder = tmp_path / "out"
    with start_echo_group(redis_server.url, engine=EchoConfig(step_s=0.02)), Client(redis_server.url) as api:
        job = api.submit(rows, model=MODEL, output=folder, split_reasoning=True, stop="stop", job_id="mine")
        live = [event for event in job.stream() if isinstance(event, RowText)]
        late = [event for event in job.stream() if isinstance(event, RowText)]
        results = list(job.rows())
        with Command("tail", "mine", MINISGL_REDIS=redis_server.url) as tail:
            tail.finish()
        with Command("tail", "mine", "--row", 0, MINISGL_REDIS=redis_server.url) as tail_row:
            tail_row.finish()
    expected = [
        ("hm, stop", "42 ", TEXTS[0][: TEXTS[0].index(" here") - 4]),
        ("", "plain", "plain"),
        ("hm", "", TEXTS[2]),
    ]
    assert [(row.reasoning_text, row.text, row.raw_text) for row in results] == expected
    for events in (live, late):
        for index, (reasoning, text, raw) in enumerate(expected):
            own = [event for event in events if event.row_index == index]
            assert "".join(event.text for event in own if event.is_reasoning) == reasoning
            assert "".join(event.text for event in own if not event.is_reasoning) == text
            assert all(raw[event.offset :].startswith(event.text) for event in own)
    assert sorted(tail.stdout.splitlines()) == ["0\t42 ", "1\tplain", "2\t"]
    assert tail_row.stdout == "hm, stop\n\n42 \n"
