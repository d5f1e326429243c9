"""What the scheduler needs of an engine: steps that are launched, and answer later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minisgl_batch.batch import FillMasks, IntArray, ScheduledBatch


class LaunchedStep(Protocol):
    """A step on its way."""

    def constrain(self, fill: FillMasks) -> None:
        """Let a step with constrained rows sample, for which it waits; rank 0 asks for their masks."""

    def tokens(self) -> IntArray:
        """The sampled tokens, one for each row with `samples`; waits for them."""

    def scores(self) -> IntArray:
        """The words of `Scoring`, flat: those of sampled tokens, then those of prompts; waits for them."""


class StepRunner(Protocol):
    """What the scheduler needs of an engine."""

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Start a step; steps run in the order they were launched."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step whose tokens the scheduler hasn't seen."""

    batch: ScheduledBatch
    step: LaunchedStep
