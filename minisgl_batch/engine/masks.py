"""Masks of constrained rows on their way to the device, while it runs the model.

On a GPU they are written to pinned buffers and copied on a stream of their own, so that the copy doesn't queue behind
the step; buffers are made when the first constrained rows come. Called by the engine, on its stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from minisgl_batch.batch import FillMasks


class MaskUploads(ABC):
    """Masks of up to `max_rows` rows, of `num_words` int32 each."""

    def __init__(self, max_rows: int, num_words: int) -> None:
        self._max_rows = max_rows
        self.num_words = num_words

    @abstractmethod
    def upload(self, num_rows: int, fill: FillMasks) -> torch.Tensor:
        """(num_rows, num_words) int32 on the device, valid until the second upload after this one."""


class HostMasks(MaskUploads):
    """The device is the host."""

    def upload(self, num_rows: int, fill: FillMasks) -> torch.Tensor:
        masks = np.empty((num_rows, self.num_words), dtype=np.int32)
        fill(masks)
        return torch.from_numpy(masks)


class CudaMasks(MaskUploads):
    """To a GPU."""

    def __init__(self, max_rows: int, num_words: int, device: torch.device) -> None:
        super().__init__(max_rows, num_words)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: list[_Buffer] = []

    def upload(self, num_rows: int, fill: FillMasks) -> torch.Tensor:
        if not self._buffers:
            self._buffers = [_Buffer(self._max_rows, self.num_words, self._device) for _ in range(2)]
        buffer, other = self._buffers
        self._buffers = [other, buffer]
        buffer.copied.synchronize()
        fill(buffer.pinned.numpy()[:num_rows])
        engine = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(buffer.last_step)
            buffer.masks[:num_rows].copy_(buffer.pinned[:num_rows], non_blocking=True)
            buffer.copied.record()
        engine.wait_event(buffer.copied)
        other.last_step.record()  # what read the other one was launched before
        return buffer.masks[:num_rows]


class _Buffer:
    """
    Attributes:
        pinned, masks: (max_rows, num_words) int32, on the host and on the device.
        copied: after the last copy between them.
        last_step: behind all that reads `masks`.
    """

    def __init__(self, max_rows: int, num_words: int, device: torch.device) -> None:
        self.pinned = torch.empty((max_rows, num_words), dtype=torch.int32, pin_memory=True)
        self.masks = torch.empty((max_rows, num_words), dtype=torch.int32, device=device)
        self.copied = torch.cuda.Event()
        self.last_step = torch.cuda.Event()
        self.last_step.record()  # the memory may have been that of kernels that still run
