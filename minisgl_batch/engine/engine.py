"""One rank's engine: the model, its KV pool and tables on one device, and the steps it runs.

It runs what a scheduler decided, in the order it was launched. On a GPU a launch returns before the step is done:
everything goes to one stream, decode steps as CUDA graphs, and the host waits for tokens only. It knows no requests,
no queue and no text.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from minisgl_batch.attention.base import AttnHeads, BackendSetup, ForwardContext, GraphBackend
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.registry import make_backend, widens_layers
from minisgl_batch.batch import NO_EDITS, FillMasks, IntArray, ScheduledBatch, Scoring, SharingCosts
from minisgl_batch.config import EngineConfig
from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.engine import memory
from minisgl_batch.engine.graph import GraphParts, GraphRunner
from minisgl_batch.engine.masks import CudaMasks, HostMasks, MaskUploads
from minisgl_batch.engine.options import resolve
from minisgl_batch.engine.sampler import MaskedRows, sample_together
from minisgl_batch.engine.scores import score_hidden, score_logits
from minisgl_batch.engine.step import Step
from minisgl_batch.engine.tables import MAX_UPLOAD, DeviceTables
from minisgl_batch.engine.transfer import CudaTransfer, HostTokens, HostTransfer, Transfer
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.hub import commit_of, model_path, warn_of_adapter
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import init_dummy_weights, load_weights, tied_as_stored
from minisgl_batch.sampling_params import MAX_LOGPROBS
from minisgl_kernels.e4m3 import E4M3
from minisgl_kernels.fixed_order import make_fixed_order
from minisgl_kernels.matmul import Products, activate

logger = logging.getLogger(__name__)

MAX_SHARED_GROUPS = 8


@dataclass(frozen=True, slots=True)
class _Logits:
    """What the model made of a step.

    Attributes:
        logits: (num_samples, shard), slots, kv_lens: of the rows that sample; until the next step is launched.
        graph_size: which graph samples from them; None where none does.
        scored: hidden states and tokens that the former give scores of.
    """

    batch: ScheduledBatch
    logits: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    graph_size: int | None = None
    scored: tuple[torch.Tensor, torch.Tensor] | None = None


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
        path = model_path(config.model, config.revision)
        self._commit = commit_of(path)
        checkpoint = load_model_config(path)
        if config.quantization is not None or (config.dummy_weights and checkpoint.quantization is not None):
            checkpoint = checkpoint.quantized(at_load=config.dummy_weights)
        self.options = options = resolve(config, checkpoint, tp.local_rank)
        model_config = checkpoint.limited_to(options.max_seq_len)
        if not config.dummy_weights:
            model_config = tied_as_stored(model_config, path, options.dtype)
        self._model_config = model_config
        self._tp = tp
        self._device = device = options.device
        self._heads = AttnHeads(
            num_heads=model_config.num_heads // tp.size,
            num_kv_heads=model_config.num_kv_heads_per_rank(tp.size),
            head_dim=model_config.head_dim,
            scale=model_config.attention_scale,
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._products: Products | None = None
        with self._on_stream():
            self._prepare_collectives()
            budget = self._budget(config)
            self._model = make_model(model_config, tp, options.dtype, device)
            if config.dummy_weights:
                init_dummy_weights(self._model, seed=0)
            else:
                if tp.rank == 0:
                    warn_of_adapter(path)
                load_weights(self._model, path)
            if options.batch_invariant:
                self._products = make_fixed_order((p for p in self._model.parameters() if p.dim() == 2), device)
            self.num_pages = config.num_pages or min(self._of_all_ranks(self._affordable_pages(budget)))
            self.max_seq_len = min(options.max_seq_len, self.num_pages * options.page_size)
            if config.max_seq_len is not None and self.max_seq_len < config.max_seq_len:
                raise InvalidParameterError(
                    "max_seq_len",
                    f"{config.max_seq_len} tokens don't fit into the KV cache, which holds {self.max_seq_len}",
                )
            if self.max_seq_len < options.max_seq_len and tp.rank == 0:
                logger.warning(
                    "the KV cache has room for %d tokens, and the model's context is %d: longer rows are refused or "
                    "cut. Give it more with num_pages, memory_ratio or tp, or say with max_seq_len that this is enough",
                    self.max_seq_len,
                    options.max_seq_len,
                )
            self._check_sizes()
            self._pool = self._make_pool(self.num_pages)
            self._transfer = self._make_transfer()
            self._tables = DeviceTables(
                options.max_running, self.max_seq_len, options.page_size, self._pool.dummy_page, device, self._transfer
            )
            self._masks = self._make_masks()
            self._buffers: DecodeBuffers | None = None
            self._attention = make_backend(
                options.attention_backend,
                BackendSetup(self._pool, self._heads, options.dtype, self._make_buffers, options.batch_invariant),
            )
            with self._multiplying():
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

    def launch(self, batch: ScheduledBatch) -> Step:
        """Start one step: compute its tokens, sample, and put the new tokens where the next step reads them.

        A step with constrained rows samples when it is told to, before the next one is launched.
        """
        with torch.inference_mode(), self._on_stream(), self._multiplying():
            self._tables.apply(batch.edits)
            size = self._graphs.size_for(batch) if self._graphs is not None else None
            lines = None if batch.constrained is None else self._mask_lines(batch, batch.constrained)
            logits = self._run_eagerly(batch) if size is None else self._run_graph(batch, size)
            if lines is not None:
                return Step(None, partial(self._constrain, logits, lines))
            return Step(self._finish(logits, None))

    @property
    def sharing_costs(self) -> SharingCosts | None:
        """When decode rows attend to a common prefix in two levels; None: never."""
        if not self.options.share_prefixes or self._graphs is None or not isinstance(self._attention, GraphBackend):
            return None
        return self._attention.sharing_costs

    def describe(self) -> dict[str, str | int | bool]:
        """What runs where, for logs and manifests."""
        options = self.options
        return {
            "dtype": str(options.dtype).removeprefix("torch."),
            **({"kv_cache_dtype": "fp8"} if options.kv_dtype == E4M3 else {}),
            "device": torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "cpu",
            "quantization": "none" if self._model_config.quantization is None else "fp8",
            "attention_backend": options.attention_backend,
            "page_size": options.page_size,
            "batch_invariant": options.batch_invariant,
            "tp": self._tp.size,
            **({} if self._commit is None else {"revision": self._commit}),
            **({} if self._tp.comm is None else {"collectives": self._tp.comm.describe()}),
        }

    # ------------------------------------------------------------------ steps

    def _run_eagerly(self, batch: ScheduledBatch) -> _Logits:
        forward = self._tables.forward_batch(batch)
        self._attention.prepare_metadata(forward)
        context = ForwardContext(forward, self._attention, self._pool)
        hidden = self._model(forward.input_ids, forward.positions, context)
        (rows,) = self._transfer.upload([batch.samples.nonzero()[0].astype("int32")])
        logits = self._model.logits(hidden[: len(rows)])
        behind = None if forward.targets is None else (hidden[len(rows) :], forward.targets)
        return _Logits(batch, logits, forward.slots[rows], forward.kv_lens[rows], scored=behind)

    def _run_graph(self, batch: ScheduledBatch, size: int) -> _Logits:
        assert self._graphs is not None
        self._graphs.forward(batch, size)
        return _Logits(batch, *self._graphs.last_step(batch), size)

    def _finish(self, step: _Logits, masked: MaskedRows | None) -> HostTokens:
        """Sample, and score what is to be scored."""
        batch, scoring = step.batch, step.batch.scoring
        if step.graph_size is None or batch.any_adjust or masked is not None:
            # Not in a graph, which would hold float32 logits and counts for all users, who mostly don't need them.
            tokens = self._sample(step, masked)
        else:
            assert self._graphs is not None
            self._transfer.guard_tokens()
            tokens = self._graphs.sample(batch, step.graph_size)
        if scoring is None:
            return self._transfer.download(tokens)
        scores = [self._score_sampled(step.logits, tokens, scoring)]
        if step.scored is not None:
            scores.append(score_hidden(self._model, *step.scored, scoring.num_top))
        return self._transfer.download(tokens, torch.cat(scores))

    def _mask_lines(self, batch: ScheduledBatch, constrained: IntArray) -> torch.Tensor:
        """(num_samples,) int32: which mask each row has; before the model runs, so that nothing waits for it."""
        lines = np.full(np.count_nonzero(batch.samples), -1, dtype=np.int32)
        lines[constrained] = np.arange(len(constrained), dtype=np.int32)
        return self._transfer.upload([lines])[0]

    def _constrain(self, step: _Logits, lines: torch.Tensor, fill: FillMasks) -> HostTokens:
        """Let a step sample within rank 0's masks."""
        assert step.batch.constrained is not None
        num_masks = len(step.batch.constrained)
        with torch.inference_mode(), self._on_stream(), self._multiplying():
            if self._tp.rank == 0:
                masks = self._masks.upload(num_masks, fill)
            else:
                masks = torch.empty((num_masks, self._masks.num_words), dtype=torch.int32, device=self._device)
            return self._finish(step, MaskedRows(self._tp.all_gather(masks)[0], lines))

    def _score_sampled(self, logits: torch.Tensor, tokens: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Scores of those sampled tokens for which they are wanted."""
        (rows,) = self._transfer.upload([scoring.sampled])
        return score_logits(self._model, logits[rows], tokens[rows], scoring.num_top)

    def _sample(self, step: _Logits, masked: MaskedRows | None) -> torch.Tensor:
        """(num_samples,) int32 tokens; enters them."""
        batch, slots, kv_lens = step.batch, step.slots, step.kv_lens
        tokens = sample_together(
            step.logits,
            self._tables.sampling_rows(slots, kv_lens),
            self._model,
            self._tp,
            any_filter=batch.any_filter,
            adjusted=self._tables.adjusted_rows(slots, kv_lens) if batch.any_adjust else None,
            masked=masked,
        )
        self._tables.put_tokens(slots, kv_lens, tokens)
        return tokens

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _multiplying(self) -> AbstractContextManager[object]:
        return nullcontext() if self._products is None else activate(self._products)

    # --------------------------------------------------------------- building

    def _prepare_collectives(self) -> None:
        """For the largest sum, a prefill step's hidden states."""
        if self._tp.comm is not None:
            if self.options.batch_invariant and not self._tp.comm.fix_order(self.options.dtype):
                raise InvalidParameterError(
                    "batch_invariant",
                    f"with tp {self._tp.size} sums have a fixed order only in 16-bit types and between the GPUs of one "
                    "host, by pynccl; with tp 2 always",
                )
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
        useful_tokens = options.max_running * options.max_seq_len
        return memory.num_pages(budget - weights - reserve, self._page_bytes(), options.page_size, useful_tokens)

    def _page_bytes(self) -> int:
        """Of the KV pool, and of the layer that a backend may keep in the compute type beside it."""
        options = self.options
        sizes = options.page_size, self._heads.num_kv_heads, self._heads.head_dim
        num_bytes = MHAKVCache.page_bytes(self._model_config.num_layers, *sizes, options.kv_dtype)
        if options.kv_dtype == E4M3 and widens_layers(options.attention_backend):
            num_bytes += MHAKVCache.page_bytes(1, *sizes, options.dtype)
        return num_bytes

    def _check_sizes(self) -> None:
        """Refuse what no memory can hold by the option's name: allocators have names of their own for it."""
        options = self.options
        tables = options.max_running * DeviceTables.row_bytes(self.max_seq_len, options.page_size)
        memory.check_size("max_running", options.max_running, tables, self._device)
        memory.check_size("num_pages", self.num_pages, self.num_pages * self._page_bytes(), self._device)

    def _make_pool(self, num_pages: int) -> MHAKVCache:
        return MHAKVCache(
            num_layers=self._model_config.num_layers,
            num_pages=num_pages,
            page_size=self.options.page_size,
            num_kv_heads=self._heads.num_kv_heads,
            head_dim=self._heads.head_dim,
            dtype=self.options.kv_dtype,
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

    def _make_masks(self) -> MaskUploads:
        max_rows, num_words = self.options.max_running, -(-self._model_config.vocab_size // 32)
        if self._device.type == "cpu":
            return HostMasks(max_rows, num_words)
        return CudaMasks(max_rows, num_words, self._device)

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
            window=self._model_config.longest_window,
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
        self._finish(self._run_eagerly(batch), None)
        torch.cuda.synchronize(self._device)

    def _capture_graphs(self) -> GraphRunner | None:
        max_rows = min(self.options.cuda_graph_max_bs, self.options.max_running)
        if not isinstance(self._attention, GraphBackend) or self._buffers is None or max_rows < 1:
            return None
        tunes = self._products is None
        parts = GraphParts(self._model, self._tp, self._pool, self._attention, self._buffers, self._tables, tunes)
        runner = GraphRunner(parts, max_rows, self._model.vocab_shard, self.options.dtype)
        runner.capture()
        return runner
