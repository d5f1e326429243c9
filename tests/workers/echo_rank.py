"""A rank without a model, for tests and benches of everything around it: python -m tests.workers.echo_rank.

It answers each request with the request's own prompt, over and over, to the length that was asked for, and speaks to
the frontend as a real rank does. It notes each request that it begins in a log, which outlives it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np

from minisgl_batch.child_process import StatusPipe, run_child
from minisgl_batch.messages import (
    FINISH_ABORT,
    FINISH_LENGTH,
    NOT_FINISHED,
    AbortRequests,
    AddRequests,
    EngineStats,
    NewPrompt,
    Ready,
    Shutdown,
    StepOutput,
    ToEngine,
)
from minisgl_workers.links import EngineSide

MAX_SEQ_LEN = 2048


class EchoConfig(msgspec.Struct, frozen=True):
    """How the engine behaves.

    Attributes:
        sockets: where the group's sockets are.
        max_running: requests that get a token in each step; others wait.
        step_s: how long a step takes at least.
        log: file that gets a line `<monotonic seconds> <prompt ids with commas>` for each request when it comes; with
            the suffix `.ended` there is another, which gets the same line (with the same time) when it has all tokens.
        steps: file that gets a line `<monotonic seconds> <requests that run>` for each step.
        poison: a prompt that begins with this token kills the rank at its first step; -1: none does.
        hang: one that begins with this token makes the rank hang.
    """

    sockets: str = ""
    max_running: int = 256
    step_s: float = 0.0
    log: str = ""
    steps: str = ""
    poison: int = -1
    hang: int = -1


class EchoEngine:
    """All requests; those that run are in arrays with a place each."""

    def __init__(self, config: EchoConfig, link: EngineSide) -> None:
        self._config = config
        self._link = link
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._logs = [os.open(f"{config.log}{suffix}", flags) for suffix in ("", ".ended") if config.log]
        self._lines: dict[int, str] = {}  # by uid
        self._steps = os.open(config.steps, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if config.steps else -1
        self._waiting: dict[int, NewPrompt] = {}
        self._uids = np.full(config.max_running, -1, dtype=np.int64)
        self._lengths = np.zeros(config.max_running, dtype=np.int64)
        self._positions = np.zeros(config.max_running, dtype=np.int64)
        self._answers = np.zeros((config.max_running, MAX_SEQ_LEN), dtype=np.int32)
        self._num_prompt_tokens = self._num_output_tokens = self._num_steps = 0

    def run(self) -> None:
        """Serve until a Shutdown message."""
        while all(map(self._handle, self._link.receive(block=not self._waiting and not (self._uids >= 0).any()))):
            started = time.monotonic()
            self._step()
            time.sleep(max(0.0, started + self._config.step_s - time.monotonic()))

    def _handle(self, message: ToEngine) -> bool:
        match message:
            case AddRequests(prompts):
                added = {request.uid: prompt for prompt in prompts for request in prompt.requests}
                self._note(added)
                self._waiting.update(added)
            case AbortRequests(uids):
                for uid in uids:
                    self._waiting.pop(uid, None)
                places = np.flatnonzero(np.isin(self._uids, uids))
                if len(places):
                    self._send(places, np.full(len(places), -1, np.int32), np.full(len(places), FINISH_ABORT, np.uint8))
                    self._uids[places] = -1
            case Shutdown():
                return False
        return True

    def _note(self, added: dict[int, NewPrompt]) -> None:
        if self._logs:
            now = time.monotonic()
            for uid, prompt in added.items():
                ids = ",".join(map(str, np.frombuffer(prompt.prompt_ids, np.int32)))
                self._lines[uid] = f"{now:.6f} {ids}\n"
            os.write(self._logs[0], "".join(self._lines[uid] for uid in added).encode())

    def _step(self) -> None:
        """A token for each request that runs."""
        for place, uid in zip(np.flatnonzero(self._uids < 0).tolist(), list(self._waiting), strict=False):
            self._begin(place, uid, self._waiting.pop(uid))
        places = np.flatnonzero(self._uids >= 0)
        if not len(places):
            return
        if self._steps >= 0:
            os.write(self._steps, f"{time.monotonic():.6f} {len(places)}\n".encode())
        tokens = self._answers[places, self._positions[places]]
        self._positions[places] += 1
        has_ended = self._positions[places] >= self._lengths[places]
        self._num_steps += 1
        self._num_output_tokens += len(places)
        if self._logs and has_ended.any():
            os.write(self._logs[1], "".join(map(self._lines.pop, self._uids[places[has_ended]].tolist())).encode())
        self._send(places, tokens, np.where(has_ended, FINISH_LENGTH, NOT_FINISHED).astype(np.uint8))
        self._uids[places[has_ended]] = -1

    def _begin(self, place: int, uid: int, prompt: NewPrompt) -> None:
        ids = np.frombuffer(prompt.prompt_ids, dtype=np.int32)
        if ids[0] == self._config.poison:
            os.kill(os.getpid(), signal.SIGKILL)
        while ids[0] == self._config.hang:
            time.sleep(60)
        length = min(prompt.sampling.max_tokens, MAX_SEQ_LEN - len(ids))
        self._answers[place, :length] = np.resize(ids, length)
        self._uids[place], self._lengths[place], self._positions[place] = uid, length, 0
        self._num_prompt_tokens += len(ids)

    def _send(self, places: np.ndarray, tokens: np.ndarray, finish: np.ndarray) -> None:
        first = self._uids[places[self._positions[places] == 1]].tolist()
        stats = EngineStats(
            num_waiting=len(self._waiting),
            num_running=int((self._uids >= 0).sum()),
            prompt_tokens=self._num_prompt_tokens,
            output_tokens=self._num_output_tokens,
            num_steps=self._num_steps,
        )
        uids = self._uids[places].tobytes()
        self._link.send(StepOutput(uids, tokens.tobytes(), finish.tobytes(), first, [0] * len(first), stats))


def main(config: EchoConfig, status: StatusPipe) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = EngineSide(Path(config.sockets))
    engine = EchoEngine(config, link)
    link.send(Ready(MAX_SEQ_LEN, config.max_running, 0, 0, {"device": "echo"}))
    status.ready(lambda: link.progress)
    engine.run()
    link.close()


if __name__ == "__main__":
    run_child("rank 0", EchoConfig, main)
