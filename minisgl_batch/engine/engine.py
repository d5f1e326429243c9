"""One rank's engine: the model, its KV pool and tables on one device, and the steps it runs.

It runs what a scheduler decided, in the order it was launched. On a GPU a launch returns before the step is done:
everything goes to one stream, decode steps as CUDA graphs, and the host waits for tokens only. It knows no requests,
no queue and no text.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from minisgl_batch.attention.base import AttnHeads, BackendSetup, ForwardContext, GraphBackend
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.registry import make_backend
from minisgl_batch.batch import NO_EDITS, ScheduledBatch, Scoring, SharingCosts
from minisgl_batch.config import EngineConfig
from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.engine import memory
from minisgl_batch.engine.graph import GraphParts, GraphRunner
from minisgl_batch.engine.options import resolve
from minisgl_batch.engine.sampler import sample_together
from minisgl_batch.engine.scores import score_hidden, score_logits
from minisgl_batch.engine.tables import MAX_UPLOAD, DeviceTables
from minisgl_batch.engine.transfer import CudaTransfer, HostTokens, HostTransfer, Transfer
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.hub import model_path
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import init_dummy_weights, load_weights
from minisgl_batch.sampling_params import MAX_LOGPROBS

logger = logging.getLogger(__name__)

MAX_SHARED_GROUPS = 8


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

    @torch.inference_mode()
    def __init__(self, config: EngineConfig, tp: TPGroup = SINGLE) -> None:
        started = time.perf_counter()
        path = model_path(config.model)
        checkpoint = load_model_config(path)
        self.options = options = resolve(config, checkpoint, tp.local_rank)
        self._model_config = model_config = checkpoint.limited_to(options.max_seq_len)
        self._tp = tp
        self._device = device = options.device
        self._heads = AttnHeads(
            num_heads=model_config.num_heads // tp.size,
            num_kv_heads=model_config.num_kv_heads_per_rank(tp.size),
            head_dim=model_config.head_dim,
            scale=model_config.attention_scale,
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with self._on_stream():
            self._prepare_collectives()
            budget = self._budget(config)
            self._model = make_model(model_config, tp, options.dtype, device)
            if config.dummy_weights:
                init_dummy_weights(self._model, seed=0)
            else:
                load_weights(self._model, path)
            self.num_pages = config.num_pages or min(self._of_all_ranks(self._affordable_pages(budget)))
            self.max_seq_len = min(options.max_seq_len, self.num_pages * options.page_size)
            if config.max_seq_len is not None and self.max_seq_len < config.max_seq_len:
                raise InvalidParameterError(
                    "max_seq_len",
                    f"{config.max_seq_len} tokens don't fit into the KV cache, which holds {self.max_seq_len}",
                )
            self._pool = self._make_pool(self.num_pages)
            self._transfer = self._make_transfer()
            self._tables = DeviceTables(
                options.max_running, self.max_seq_len, options.page_size, self._pool.dummy_page, device, self._transfer
            )
            self._buffers: DecodeBuffers | None = None
            self._attention = make_backend(
                options.attention_backend, BackendSetup(self._pool, self._heads, self._make_buffers)
            )
            self._graphs = self._capture_graphs()
            if device.type == "cuda":
                self._warm_up()
            self._of_all_ranks(0)  # ready is who is ready with all others
        logger.info(
            "%s ready in %.1f s: KV cache of %d tokens in %d pages",
            config.model,
            time.perf_counter() - started,
            self.num_pages * options.page_size,
            self.num_pages,
        )

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> HostTokens:
        """Start one step: compute its tokens, sample, and put the new tokens where the next step reads them."""
        with self._on_stream():
            self._tables.apply(batch.edits)
            size = self._graphs.size_for(batch) if self._graphs is not None else None
            return self._transfer.download(
                *(self._run_eagerly(batch) if size is None else self._run_graph(batch, size))
            )

    @property
    def sharing_costs(self) -> SharingCosts | None:
        """When decode rows attend to a common prefix in two levels; None: never."""
        if not self.options.share_prefixes or self._graphs is None or not isinstance(self._attention, GraphBackend):
            return None
        return self._attention.sharing_costs

    def describe(self) -> dict[str, str | int]:
        """What runs where, for logs and manifests."""
        options = self.options
        return {
            "dtype": str(options.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "cpu",
            "attention_backend": options.attention_backend,
            "page_size": options.page_size,
            "tp": self._tp.size,
            **({} if self._tp.comm is None else {"collectives": self._tp.comm.describe()}),
        }

    # ------------------------------------------------------------------ steps

    def _run_eagerly(self, batch: ScheduledBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The step's tokens, and scores if it has any."""
        forward = self._tables.forward_batch(batch)
        self._attention.prepare_metadata(forward)
        context = ForwardContext(forward, self._attention, self._pool)
        hidden = self._model(forward.input_ids, forward.positions, context)
        (rows,) = self._transfer.upload([batch.samples.nonzero()[0].astype("int32")])
        slots, kv_lens = forward.slots[rows], forward.kv_lens[rows]
        logits = self._model.logits(hidden[: len(rows)])
        tokens = self._sample(logits, slots, kv_lens, batch)
        if batch.scoring is None:
            return tokens, None
        of_prompts = score_hidden(self._model, hidden[len(rows) :], forward.targets, batch.scoring.num_top)
        return tokens, torch.cat([self._score_sampled(logits, tokens, batch.scoring), of_prompts])

    def _run_graph(self, batch: ScheduledBatch, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self._graphs is not None
        self._graphs.forward(batch, size)
        logits, slots, kv_lens = self._graphs.last_step(batch)
        if batch.any_adjust:
            # Not in a graph, which would hold float32 logits and counts for all users, who mostly don't need them.
            tokens = self._sample(logits, slots, kv_lens, batch)
        else:
            self._transfer.guard_tokens()
            tokens = self._graphs.sample(batch, size)
        return tokens, None if batch.scoring is None else self._score_sampled(logits, tokens, batch.scoring)

    def _score_sampled(self, logits: torch.Tensor, tokens: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Scores of those sampled tokens for which they are wanted."""
        (rows,) = self._transfer.upload([scoring.sampled])
        return score_logits(self._model, logits[rows], tokens[rows], scoring.num_top)

    def _sample(
        self, logits: torch.Tensor, slots: torch.Tensor, kv_lens: torch.Tensor, batch: ScheduledBatch
    ) -> torch.Tensor:
        """(num_samples,) int32 tokens from (num_samples, shard) logits; enters them."""
        tokens = sample_together(
            logits,
            self._tables.sampling_rows(slots, kv_lens),
            self._model,
            self._tp,
            any_filter=batch.any_filter,
            adjusted=self._tables.adjusted_rows(slots, kv_lens) if batch.any_adjust else None,
        )
        self._tables.put_tokens(slots, kv_lens, tokens)
        return tokens

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    # --------------------------------------------------------------- building

    def _prepare_collectives(self) -> None:
        """For the largest sum, a prefill step's hidden states."""
        if self._tp.comm is not None:
            size = self.options.max_prefill_tokens * self._model_config.hidden_size
            self._tp.comm.prepare(size * self.options.dtype.itemsize)

    def _budget(self, config: EngineConfig) -> int:
        """Bytes for this rank's weights and KV pool; measured on all ranks before any of them allocates."""
        available = memory.available_bytes(self._device, config.memory_ratio)
        if self._device.type == "cpu":
            available //= self._tp.num_local  # they share the host's memory
        of_ranks = self._of_all_ranks(available)
        if config.num_pages is None:
            memory.check_balance(of_ranks)
        return available

    def _of_all_ranks(self, number: int) -> list[int]:
        """A number of each rank; returns when all have given theirs."""
        return [numbers[0] for numbers in self._tp.gather_numbers(number)]

    def _affordable_pages(self, budget: int) -> int:
        """Pages of the KV pool that memory allows, once the weights are there."""
        options = self.options
        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        reserve = memory.step_bytes(self._model_config, options)
        page_bytes = MHAKVCache.page_bytes(
            self._model_config.num_layers,
            options.page_size,
            self._heads.num_kv_heads,
            self._heads.head_dim,
            options.dtype,
        )
        useful_tokens = options.max_running * options.max_seq_len
        return memory.num_pages(budget - weights - reserve, page_bytes, options.page_size, useful_tokens)

    def _make_pool(self, num_pages: int) -> MHAKVCache:
        return MHAKVCache(
            num_layers=self._model_config.num_layers,
            num_pages=num_pages,
            page_size=self.options.page_size,
            num_kv_heads=self._heads.num_kv_heads,
            head_dim=self._heads.head_dim,
            dtype=self.options.dtype,
            device=self._device,
        )

    def _make_transfer(self) -> Transfer:
        if self._device.type == "cpu":
            return HostTransfer()
        options = self.options
        max_pages = -(-self.max_seq_len // options.page_size)
        # No upload is larger than these together: a step's tokens and rows, the pages of shared prefixes, and edits.
        step = 3 * options.max_prefill_tokens + 8 * options.max_running
        largest = step + (MAX_SHARED_GROUPS + 1) * max_pages + MAX_UPLOAD
        scored = options.max_running + options.max_prefill_tokens
        return CudaTransfer(self._device, largest, options.max_running + scored * (2 + 2 * MAX_LOGPROBS))

    def _make_buffers(self) -> DecodeBuffers:
        assert isinstance(self._transfer, CudaTransfer)
        options = self.options
        self._buffers = DecodeBuffers(
            max_rows=options.max_running,
            max_pages=self._tables.page_table.shape[1],
            max_groups=MAX_SHARED_GROUPS,
            page_size=options.page_size,
            dummy_slot=options.max_running,
            device=self._device,
            upload_into=self._transfer.upload_into,
        )
        return self._buffers

    def _warm_up(self) -> None:
        """Run the largest step of pieces once, on the dummy row: its kernels are compiled, and its memory is there."""
        num_tokens = min(self.options.max_prefill_tokens, self.max_seq_len - 1)
        one = np.array([num_tokens], dtype=np.int32)
        batch = ScheduledBatch(
            slots=np.array([self.options.max_running], dtype=np.int32),
            q_lens=one,
            kv_lens=one,
            num_decode=0,
            new_pages=one[:0],
            samples=np.array([True]),
            any_filter=False,
            edits=NO_EDITS,
        )
        self._run_eagerly(batch)
        torch.cuda.synchronize(self._device)

    def _capture_graphs(self) -> GraphRunner | None:
        max_rows = min(self.options.cuda_graph_max_bs, self.options.max_running)
        if not isinstance(self._attention, GraphBackend) or self._buffers is None or max_rows < 1:
            return None
        parts = GraphParts(self._model, self._tp, self._pool, self._attention, self._buffers, self._tables)
        runner = GraphRunner(parts, max_rows, self._model.vocab_shard, self.options.dtype)
        runner.capture()
        return runner
