"""A reader of a job's tokens that checks what it reads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

from minisgl_batch.client import Client
from minisgl_jobs.dataset import read_dataset
from minisgl_jobs.row_texts import RowFinished, RowStarted, RowText


class Reader(threading.Thread):
    """Reads all tokens of a job, at its own pace."""

    def __init__(self, url: str, job_id: str, pause_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._url, self._job_id, self._pause_s = url, job_id, pause_s
        self.texts: dict[int, str] = {}
        self.num_ends: Counter[int] = Counter()
        self.num_events = 0
        self.start()

    def run(self) -> None:
        with Client(self._url) as client:
            for event in client.job(self._job_id).stream():
                self.num_events += 1
                time.sleep(self._pause_s)
                match event:
                    case RowStarted():
                        self.texts[event.row_index] = ""
                    case RowText():
                        assert event.offset == len(self.texts[event.row_index])
                        self.texts[event.row_index] += event.text
                    case RowFinished():
                        self.num_ends[event.row_index] += 1

    def check(self, output: Path, timeout_s: float) -> None:
        """It has seen every text whole, and every end once."""
        self.join(timeout_s)
        assert not self.is_alive()
        table = read_dataset(output)
        assert self.texts == dict(zip(table["row_index"].to_pylist(), table["text"].to_pylist(), strict=True))
        assert set(self.num_ends.values()) == {1}
        assert len(self.num_ends) == table.num_rows
