"""Small arrays between host and device without waiting: one copy a step each way.

On a GPU uploads leave from pinned buffers, which are used in turn and only when their last copy has been made; sampled
tokens come back on a stream of their own, so that the next step doesn't queue behind the copy. On a CPU nothing is
copied. Called by the engine, on its stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl_batch.batch import IntArray

_NUM_BUFFERS = 4  # steps are at most two ahead of the device


@dataclass(frozen=True, slots=True)
class HostTokens:
    """Tokens on their way to the host, and what was scored in the same step."""

    array: IntArray  # the tokens, then the scores' words
    num_tokens: int
    arrived: torch.cuda.Event | None

    def tokens(self) -> IntArray:
        """(num_samples,): the tokens; waits for them."""
        return self._arrived()[: self.num_tokens]

    def scores(self) -> IntArray:
        """The scores' words, flat; waits for them."""
        return self._arrived()[self.num_tokens :]

    def _arrived(self) -> IntArray:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.array


class Transfer(ABC):
    """See the module's docstring."""

    @abstractmethod
    def upload(self, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """The arrays on the device, int32 each, in one copy."""

    @abstractmethod
    def download(self, tokens: torch.Tensor, scores: torch.Tensor | None = None) -> HostTokens:
        """(num_samples,) and (num_scored, num_words) int32 on the device, on their way to the host."""

    @abstractmethod
    def guard_tokens(self) -> None:
        """Before tokens that were downloaded are overwritten: let the device, not the host, wait for their copy."""


class HostTransfer(Transfer):
    """The device is the host."""

    def upload(self, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def download(self, tokens: torch.Tensor, scores: torch.Tensor | None = None) -> HostTokens:
        return HostTokens(_joined(tokens, scores).numpy(), len(tokens), None)

    def guard_tokens(self) -> None:
        return  # nothing is copied


class CudaTransfer(Transfer):
    """To and from a GPU.

    Args:
        device: the GPU.
        max_upload: int32 values of one upload.
        max_download: int32 values of one download.
    """

    def __init__(self, device: torch.device, max_upload: int, max_download: int) -> None:
        self._device = device
        self._uploads = PinnedRing(max_upload)
        self._downloads = PinnedRing(max_download)
        self._stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None

    def upload(self, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        sizes = [array.size for array in arrays]
        target = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        self.upload_into(target, arrays)
        return [part.view(array.shape) for part, array in zip(target.split(sizes), arrays, strict=True)]

    def upload_into(self, target: torch.Tensor, arrays: Sequence[IntArray]) -> None:
        """The arrays, one after the other, into the beginning of `target`, (n,) int32."""
        pinned = self._uploads.take()
        num_values = sum(array.size for array in arrays)
        np.concatenate([array.reshape(-1) for array in arrays], out=pinned.array[:num_values])
        target[:num_values].copy_(pinned.tensor[:num_values], non_blocking=True)
        pinned.used.record()

    def download(self, tokens: torch.Tensor, scores: torch.Tensor | None = None) -> HostTokens:
        values = _joined(tokens, scores)
        pinned, made = self._downloads.take(), torch.cuda.Event()
        made.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            pinned.tensor[: len(values)].copy_(values, non_blocking=True)
            pinned.used.record()
        values.record_stream(self._stream)
        self._copied = pinned.used
        return HostTokens(pinned.array[: len(values)], len(tokens), pinned.used)

    def guard_tokens(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)


def _joined(tokens: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    return tokens if scores is None else torch.cat([tokens, scores.flatten()])


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pinned buffer, as a tensor and as an array, and the event after its last copy."""

    tensor: torch.Tensor
    array: IntArray
    used: torch.cuda.Event


class PinnedRing:
    """Pinned int32 buffers that are used in turn."""

    def __init__(self, num_values: int) -> None:
        tensors = [torch.empty(num_values, dtype=torch.int32, pin_memory=True) for _ in range(_NUM_BUFFERS)]
        self._buffers = [Pinned(tensor, tensor.numpy(), torch.cuda.Event()) for tensor in tensors]
        self._next = 0

    def take(self) -> Pinned:
        """The next buffer, once its last copy has been made (which it has long been, but for a stalled device)."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        buffer.used.synchronize()
        return buffer
