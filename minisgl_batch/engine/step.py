"""A launched step of the engine: its tokens on their way, or, with constrained rows, what is left of it to launch."""

from __future__ import annotations

from collections.abc import Callable

from minisgl_batch.batch import FillMasks, IntArray
from minisgl_batch.engine.transfer import HostTokens


class Step:
    """See the module's docstring."""

    def __init__(self, sampled: HostTokens | None, sample: Callable[[FillMasks], HostTokens] | None = None) -> None:
        """What was sampled, or what will sample when the step is told to."""
        self._sampled = sampled
        self._sample = sample

    def constrain(self, fill: FillMasks) -> None:
        """Let a step with constrained rows sample, within the masks that `fill` writes."""
        assert self._sample is not None
        self._sampled = self._sample(fill)

    def tokens(self) -> IntArray:
        """(num_samples,): the tokens; waits for them."""
        return self._on_its_way().tokens()

    def scores(self) -> IntArray:
        """The scores' words, flat; waits for them."""
        return self._on_its_way().scores()

    def _on_its_way(self) -> HostTokens:
        assert self._sampled is not None, "a step with constrained rows wasn't told to sample"
        return self._sampled
