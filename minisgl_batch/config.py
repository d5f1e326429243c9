"""The engine's options, as users give them.

`None` or "auto" means "not given"; `minisgl_batch.engine` resolves every such value once, when it knows the model and
the device. Nothing changes a config after it was made. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.param_checks import check_bool, check_float, check_int

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "fp8"]
CacheKind = Literal["radix", "naive"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["fp8"]
MAX_COUNT = 1 << 31


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    Attributes:
        model: "demo", a local folder in Hugging Face format, or a hub id.
        revision: of a hub id, the branch, tag or commit; "ORG/NAME@REVISION" for a model says the same.
        page_size: tokens per KV page.
        num_pages: pages of the KV pool; without it, from the free memory and `memory_ratio`.
        max_running: most requests in one decode step.
        max_prefill_tokens: token budget of one prefill step; also bounds how long an abort takes.
        max_seq_len: longest prompt + output in tokens; without it, the model's context.
        memory_ratio: share of the free memory for weights and KV pool together; without it 0.9 of a GPU's and 0.4 of a
            host's.
        dtype: compute type; "auto" is the checkpoint's, or float32 on CPUs without fast bfloat16.
        quantization: "fp8" puts the linear layers' weights into FP8 as they are loaded, and their inputs as they come;
            checkpoints in FP8 need no option.
        kv_cache_dtype: how keys and values are kept; "auto" is the compute type, "fp8" is e4m3, a byte each.
        attention_backend: a registered name, "prefill,decode" for two of them, or "auto".
        cache: "radix" reuses prefixes; "naive" never does.
        overlap: prepare step N+1 while N runs; without it, on for GPUs and off for CPUs.
        cuda_graph_max_bs: decode steps of up to so many rows are CUDA graphs; 0 captures none.
        mixed: let decode rows and pieces of prompts share steps; without it, off for GPUs and on for CPUs.
        share_prefixes: attend to a prefix that many rows have once for all of them, where that is faster.
        batch_invariant: compute a token from its own prefix alone, to the last bit, whatever runs beside it; slower.
        tp: ranks that share the model, each a process with a device of its own.
        check_ranks: compare what the ranks run every so many steps, to find a fault of ours; 0 never does.
        pynccl: between GPUs, use NCCL from Python and kernels of our own; else torch.distributed's NCCL.
        dummy_weights: random weights instead of the checkpoint's, for benchmarks.
        device: "cuda", "cpu" or "auto".
    """

    model: str
    page_size: int | None = None
    num_pages: int | None = None
    max_running: int | None = None
    max_prefill_tokens: int | None = None
    max_seq_len: int | None = None
    memory_ratio: float | None = None
    dtype: Dtype = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    attention_backend: str = "auto"
    cache: CacheKind = "radix"
    overlap: bool | None = None
    cuda_graph_max_bs: int | None = None
    mixed: bool | None = None
    share_prefixes: bool = True
    batch_invariant: bool = False
    tp: int = 1
    check_ranks: int = 0
    pynccl: bool = True
    dummy_weights: bool = False
    device: Device = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidParameterError("model", f"must be a name or a folder, got {self.model!r}")
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise InvalidParameterError("revision", f"must be a branch, tag or commit, got {self.revision!r}")
        check_int("tp", self.tp, 1, MAX_COUNT)
        check_int("check_ranks", self.check_ranks, 0, MAX_COUNT)
        for name in ("page_size", "num_pages", "max_running", "max_prefill_tokens", "max_seq_len", "cuda_graph_max_bs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, 0 if name == "cuda_graph_max_bs" else 1, MAX_COUNT)
        for name in ("overlap", "mixed", "share_prefixes", "batch_invariant", "pynccl", "dummy_weights"):
            check_bool(name, getattr(self, name))
        if self.memory_ratio is not None:
            check_float("memory_ratio", self.memory_ratio, 0.0, 1.0, low_open=True)
        kinds = {"dtype": Dtype, "kv_cache_dtype": KVCacheDtype, "cache": CacheKind, "device": Device}
        for name, known in ((name, get_args(kind)) for name, kind in kinds.items()):
            if getattr(self, name) not in known:
                raise InvalidParameterError(name, f"must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.quantization not in (None, *get_args(Quantization)):
            methods = ", ".join(get_args(Quantization))
            raise InvalidParameterError("quantization", f"must be None or {methods}, got {self.quantization!r}")
        if not isinstance(self.attention_backend, str):
            raise InvalidParameterError("attention_backend", f"must be a name, got {self.attention_backend!r}")
