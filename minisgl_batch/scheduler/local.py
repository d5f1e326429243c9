"""An engine for a caller in this process: rank 0 with messages from lists, and its followers as child processes.

The caller fills the inbox and runs tick after tick. Called by the in-process `LLM` and the bench.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from minisgl_batch.config import EngineConfig
from minisgl_batch.engine.options import pick_device
from minisgl_batch.errors import WorkerError
from minisgl_batch.hub import model_path
from minisgl_batch.messages import FromEngine, Ready, Shutdown
from minisgl_batch.models.config import load_model_config
from minisgl_batch.scheduler.followers import Followers
from minisgl_batch.scheduler.rank import Links, Rank
from minisgl_batch.scheduler.scheduler import Scheduler
from minisgl_batch.scheduler.source import LocalSource


class LocalEngine:
    """See the module's docstring.

    Attributes:
        source: its inbox is the caller's to fill.
        ready: what the engine is.
        scheduler: rank 0's.
        is_usable: False once a tick was left by an error or an interrupt; what ran then is lost.

    Raises:
        ModelError, InvalidParameterError: as Engine does.
        WorkerError: a follower failed or died; the message says which and why.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.source = LocalSource()
        self.is_usable = True
        self._left = ""
        self._followers: Followers | None = None
        if config.tp == 1:
            self._rank = Rank(config, self.source, Links())
        else:
            load_model_config(model_path(config.model, config.revision)).check_tp_size(config.tp)
            pick_device(config.device, config.tp - 1)
            self._followers = Followers(config)
            try:
                with self._blamed():
                    self._rank = Rank(config, self.source, self._followers.join(config))
            except BaseException:
                self._followers.stop()
                raise
        self.use(self._rank.scheduler)
        ready = self.source.outbox.popleft()
        assert isinstance(ready, Ready)
        self.ready = ready

    def use(self, scheduler: Scheduler) -> None:
        """Run this scheduler from now on, which has the same source."""
        self.scheduler = scheduler
        self._loop: Iterator[None] = scheduler.loop()

    def tick(self) -> list[FromEngine]:
        """One tick of the scheduler, and what it had to say.

        Raises:
            WorkerError: a follower failed or died, now or before.
        """
        if not self.is_usable:
            raise WorkerError(f"the engine can't go on, make a new one: {self._left}")
        self.is_usable = False
        try:
            with self._blamed():
                next(self._loop)
        except BaseException as error:
            self._left = f"a step was left by {type(error).__name__}" + (f": {error}" if str(error) else "")
            raise
        self.is_usable = True
        messages = list(self.source.outbox)
        self.source.outbox.clear()
        return messages

    def close(self) -> None:
        """Free the engine and end the followers; nothing is called afterwards."""
        if self.is_usable:
            self.source.inbox.append(Shutdown())  # followers get it too
            for _ in self._loop:
                pass
        self.is_usable = False
        del self._loop, self.scheduler
        self._rank.close()
        if self._followers is not None:
            self._followers.stop()

    def _blamed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._followers is None else self._followers.blamed()
