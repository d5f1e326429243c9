"""What the in-process `LLM` shows while it generates. Knows nothing of engines."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from minisgl_batch.tokenizer import SampleOutput


class progress_bar:  # noqa: N801  # a context manager that reads as a function
    """A bar of finished prompts with the rate of output tokens."""

    def __init__(self, total: int, *, shown: bool) -> None:
        from rich.console import Console

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._bar.add_task("generating", total=total, rate="")
        self._started = time.perf_counter()
        self._num_tokens = 0

    def __enter__(self) -> progress_bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def count(self, sample: SampleOutput) -> None:
        self._num_tokens += len(sample.token_ids)
        rate = self._num_tokens / (time.perf_counter() - self._started)
        self._bar.update(self._task, advance=1, rate=f"{rate:,.0f} tok/s")
