"""One rank's engine: the model, its KV pool and tables on one device, and the steps it runs.

It runs what a scheduler decided, in the order it was launched. It knows no requests, no queue and no text.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from minisgl_batch.attention.base import ForwardContext
from minisgl_batch.attention.registry import make_backend
from minisgl_batch.batch import IntArray, ScheduledBatch
from minisgl_batch.config import EngineConfig
from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.engine import memory
from minisgl_batch.engine.options import resolve
from minisgl_batch.engine.sampler import sample
from minisgl_batch.engine.tables import DeviceTables
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.hub import model_path
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import init_dummy_weights, load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A launched step's tokens, on the device until somebody asks."""

    device_tokens: torch.Tensor  # (num_samples,) int32

    def tokens(self) -> IntArray:
        array: IntArray = self.device_tokens.cpu().numpy()
        return array


class Engine:
    """See the module's docstring.

    Attributes:
        options: the resolved options.
        max_seq_len: longest prompt + output in tokens: the model's context, or what fits into the pool.
        num_pages: pages of the KV pool.

    Raises:
        ModelError: the model can't be loaded or doesn't fit.
        InvalidParameterError: an option doesn't fit the model or the machine.
    """

    def __init__(self, config: EngineConfig, tp: TPGroup = SINGLE) -> None:
        started = time.perf_counter()
        self._tp = tp
        path = model_path(config.model)
        self.model_config = load_model_config(path)
        self.options = options = resolve(config, self.model_config)
        device = options.device
        budget = memory.available_bytes(device, config.memory_ratio)

        self._model = make_model(self.model_config, tp, options.dtype, device)
        if config.dummy_weights:
            init_dummy_weights(self._model, seed=0)
        else:
            load_weights(self._model, path)
        weight_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())

        num_kv_heads = max(1, self.model_config.num_kv_heads // tp.size)
        page_bytes = MHAKVCache.page_bytes(
            self.model_config.num_layers, options.page_size, num_kv_heads, self.model_config.head_dim, options.dtype
        )
        self.num_pages = config.num_pages or memory.num_pages(
            budget - weight_bytes, page_bytes, options.page_size, options.max_running * options.max_seq_len
        )
        self.max_seq_len = min(options.max_seq_len, self.num_pages * options.page_size)
        if config.max_seq_len is not None and self.max_seq_len < config.max_seq_len:
            raise InvalidParameterError(
                "max_seq_len",
                f"{config.max_seq_len} tokens don't fit into the KV cache, which holds {self.max_seq_len}",
            )

        self._pool = MHAKVCache(
            num_layers=self.model_config.num_layers,
            num_pages=self.num_pages,
            page_size=options.page_size,
            num_kv_heads=num_kv_heads,
            head_dim=self.model_config.head_dim,
            dtype=options.dtype,
            device=device,
        )
        self._attention = make_backend(options.attention_backend, self._pool)
        self._tables = DeviceTables(
            options.max_running, self.max_seq_len, options.page_size, self._pool.dummy_page, device
        )
        logger.info(
            "%s ready in %.1f s: %.0f MB of weights, KV cache of %d tokens in %d pages",
            config.model,
            time.perf_counter() - started,
            weight_bytes / 1e6,
            self.num_pages * options.page_size,
            self.num_pages,
        )

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> EngineStep:
        """Run one step: compute its tokens, sample, and put the new tokens where the next step reads them."""
        self._tables.apply(batch.edits)
        self._tables.add_pages(batch)
        forward = self._tables.forward_batch(batch)
        self._attention.prepare_metadata(forward)
        context = ForwardContext(forward, self._attention, self._pool)
        hidden = self._model(forward.input_ids, forward.positions, context)
        logits = self._model.logits(hidden[forward.sample_tokens])
        tokens = self._sample(logits, batch)
        self._tables.put_tokens(batch, tokens)
        return EngineStep(tokens)

    def _sample(self, logits: torch.Tensor, batch: ScheduledBatch) -> torch.Tensor:
        rows = self._tables.sampling_rows(batch)
        if batch.any_filter:
            return sample(self._model.gather_logits(logits), rows, any_filter=True)
        vocab_start = self._model.vocab_range.start
        return sample(logits, rows, any_filter=False, vocab_start=vocab_start, tp=self._tp)

    def describe(self) -> dict[str, str | int]:
        """What runs where, for logs and manifests."""
        options = self.options
        return {
            "dtype": str(options.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "cpu",
            "attention_backend": options.attention_backend,
            "page_size": options.page_size,
        }
