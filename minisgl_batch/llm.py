"""The engine in this process: prompts in, texts out, without Redis.

    llm = LLM("demo")
    for output in llm.chat([{"role": "user", "content": "What is 17 + 25?"}]): print(output.outputs[0].text)

The same scheduler and engine as in a worker group, fed from lists instead of sockets. With `tp=N` this process is the
first of N ranks, and the others are child processes. For one thread.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, cast

from minisgl_batch.config import CacheKind, Dtype, EngineConfig, KVCacheDtype, Quantization
from minisgl_batch.errors import RequestError, UsageError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.hub import model_path
from minisgl_batch.interrupts import interrupts_held
from minisgl_batch.llm_call import Call
from minisgl_batch.messages import (
    AbortRequests,
    AddRequests,
    EngineStats,
    Ready,
    RequestsRefused,
    StepOutput,
)
from minisgl_batch.models.fetch import fetch_model
from minisgl_batch.other_fields import no_such, refuse_others
from minisgl_batch.outputs import RequestOutput, StreamEvent
from minisgl_batch.param_checks import check_int
from minisgl_batch.progress_bar import progress_bar
from minisgl_batch.prompts import Prompts, as_chats, as_prompts
from minisgl_batch.sampling_params import CHAT_OPTIONS, MAX_SEED, SamplingParams, Truncate
from minisgl_batch.scheduler.local import LocalEngine
from minisgl_batch.tokenizer import (
    ModelTokenizer,
    OutputEvents,
    OutputProcessor,
    PromptInput,
    resolve_requests,
)
from minisgl_batch.words import count

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None

# What to do about arguments that methods haven't.
_IN_PARAMS = {field: f"give SamplingParams({field}=...)" for field in SamplingParams.__struct_fields__}
_AS_PROMPTS = {"prompt_token_ids": "give the ids for prompts: a list of them is a prompt"}
_BESIDE_CHOICES = {
    **dict.fromkeys(SamplingParams.__struct_fields__, "remove it, as nothing is generated"),
    **{field: f"use generate with SamplingParams(choices=..., {field}=...)" for field in CHAT_OPTIONS},
    "sampling_params": "use generate with SamplingParams(choices=...)",
}


class LLM:
    """A model with its engine.

    Args:
        model: "demo", a local folder in Hugging Face format, or a hub id.
        seed: makes samples of prompts without a seed of their own repeatable.
        page_size, num_pages, max_running, max_prefill_tokens, max_seq_len, memory_ratio, dtype, quantization,
        kv_cache_dtype, attention_backend, cache, overlap, cuda_graph_max_bs, mixed, share_prefixes, batch_invariant,
        tp, check_ranks, pynccl, dummy_weights, device, revision: see `EngineConfig`.

    Raises:
        ModelError: the model can't be found or loaded, or doesn't fit into memory.
        InvalidParameterError: an option has a value that can't be used; names it.
        WorkerError: a rank failed or died; so do `generate`, `chat` and `stream`, and the LLM is of no more use.

    Ctrl-C ends a call between two steps, and the next call works; a second one during the same step leaves the step at
    once, and then the LLM is of no more use.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_running: int | None = None,
        max_prefill_tokens: int | None = None,
        max_seq_len: int | None = None,
        memory_ratio: float | None = None,
        dtype: Dtype = "auto",
        quantization: Quantization | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        attention_backend: str = "auto",
        cache: CacheKind = "radix",
        overlap: bool | None = None,
        cuda_graph_max_bs: int | None = None,
        mixed: bool | None = None,
        share_prefixes: bool = True,
        batch_invariant: bool = False,
        tp: int = 1,
        check_ranks: int = 0,
        pynccl: bool = True,
        dummy_weights: bool = False,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        revision: str | None = None,
        **others: Any,
    ) -> None:
        if others:
            raise no_such(min(others), "argument of LLM", frozenset(("seed", *EngineConfig.__dataclass_fields__)))
        if seed is not None:
            check_int("seed", seed, 0, MAX_SEED)
        self.config = EngineConfig(
            model=model,
            page_size=page_size,
            num_pages=num_pages,
            max_running=max_running,
            max_prefill_tokens=max_prefill_tokens,
            max_seq_len=max_seq_len,
            memory_ratio=memory_ratio,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            attention_backend=attention_backend,
            cache=cache,
            overlap=overlap,
            cuda_graph_max_bs=cuda_graph_max_bs,
            mixed=mixed,
            share_prefixes=share_prefixes,
            batch_invariant=batch_invariant,
            tp=tp,
            check_ranks=check_ranks,
            pynccl=pynccl,
            dummy_weights=dummy_weights,
            device=device,
            revision=revision,
        )
        fetched = fetch_model(self.config)
        self.tokenizer = ModelTokenizer.load(model_path(fetched.model))
        self._engine = LocalEngine(fetched)
        self._grammar_check = GrammarCheck()
        self._end = weakref.finalize(self, _close, self._engine, self._grammar_check)
        self._inbox = self._engine.source.inbox
        self.max_seq_len = self._engine.ready.max_seq_len
        self._outputs = OutputProcessor(self.tokenizer.detokenizer)
        self._seed = secrets.randbelow(MAX_SEED) if seed is None else seed
        self._num_prompts = 0
        self._next_uid = 0
        self._has_given_vocabulary = False

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self.tokenizer.hf_tokenizer

    def generate(
        self, prompts: Prompts | None = None, sampling_params: Params = None, *, progress: bool = True, **others: Any
    ) -> list[RequestOutput]:
        """Generate for all prompts and return when all are done, in their order.

        Args:
            prompts: one prompt or many; each is a text, a list of token ids, a list of chat messages, {"prompt": text}
                or {"prompt_token_ids": ids}.
            sampling_params: for all prompts, or one for each; fields that aren't given come from the model's generation
                config.
            progress: show a progress bar on standard error.

        Returns:
            Of each prompt its outputs. One whose grammar came to a dead end has "error" for a `finish_reason`.

        Raises:
            RequestError: a prompt can't be served, such as one longer than the context; names it. Nothing has run, but
                where a grammar takes too much time or memory.
        """
        refuse_others(others, LLM.generate, _IN_PARAMS | _AS_PROMPTS)
        return self._generate(as_prompts(prompts), sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        progress: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        continue_final_message: bool | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """`generate` for one chat, which is a list of messages, or a list of chats.

        Args:
            messages, sampling_params, progress: as `generate`.
            tools, chat_template_kwargs, continue_final_message: of chats whose `sampling_params` don't say otherwise.

        Raises:
            UsageError: it is something else, or an argument has a value that can't be used.
            RequestError: as `generate`.
        """
        refuse_others(others, LLM.chat, _IN_PARAMS)
        chats = as_chats(messages)
        options = SamplingParams(
            tools=cast(Any, tools),  # which looks at it, and makes it a tuple
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
        )
        layers = [layer.over(options) for layer in _layers(sampling_params, len(chats))]
        return self._generate(chats, layers, progress)

    def score(
        self,
        prompts: Prompts,
        choices: Sequence[str] | Sequence[Sequence[str]],
        *,
        truncate: Truncate | None = None,
        progress: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """How probable given continuations are: `generate` with `SamplingParams(choices=...)`.

        Args:
            prompts: as `generate`.
            choices: continuations of each prompt, or a list of them for each one.
            truncate: "left" or "right" makes room for the longest choice in a prompt that is too long.
            progress: as `generate`.

        Returns:
            Of each prompt one output, whose `choices` are scored and whose `text` is the most probable one.

        Raises:
            UsageError: the choices or `truncate` can't be used.
            RequestError: as `generate`.
        """
        refuse_others(others, LLM.score, _BESIDE_CHOICES)
        inputs = as_prompts(prompts)
        layers = [SamplingParams(choices=texts, truncate=truncate) for texts in _each(choices, len(inputs))]
        return self._generate(inputs, layers, progress)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[StreamEvent]:
        """Generate for all prompts, and yield text as it comes. A caller who leaves early ends what still runs.

        Arguments and errors as `generate`.
        """
        call = self._prepare(as_prompts(prompts), sampling_params)
        for events in self._run(call, watch=True):
            finished = {sample.uid: call.collect(sample) for sample in events.finished}
            for delta in events.deltas:
                ended = finished.pop(delta.uid, None)
                found = delta.reasoning
                reasoning, text = ("", delta.text) if found is None else found.split(delta.text, delta.offset)
                if text or reasoning or ended is not None:
                    yield StreamEvent(*call.owner(delta.uid), text, ended, reasoning)
            for uid, output in finished.items():
                yield StreamEvent(*call.owner(uid), "", output)

    def stats(self) -> EngineStats:
        """Counters since the start: tokens, cache hits, steps."""
        self._check_open()
        return self._engine.scheduler.stats()

    def close(self) -> None:
        """Free the engine's memory and end its processes, as the end of the program does; nothing is called then."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------- internals

    def _check_open(self) -> None:
        if not self._end.alive:
            raise UsageError("this LLM is closed: make a new one")

    def _generate(self, inputs: list[PromptInput], params: Params, progress: bool) -> list[RequestOutput]:
        call = self._prepare(inputs, params)
        with progress_bar(len(call.uids()), shown=progress) as bar:
            for events in self._run(call):
                for sample in events.finished:
                    call.keep(sample)
                    bar.count(sample)
        return call.outputs()

    def _prepare(self, inputs: list[PromptInput], params: Params) -> Call:
        self._check_open()
        layers = _layers(params, len(inputs))
        call = Call(inputs, self.tokenizer)
        requests = resolve_requests(
            self.tokenizer,
            inputs,
            layers,
            range(self._num_prompts, self._num_prompts + len(inputs)),
            defaults=SamplingParams(),
            max_len=self.max_seq_len,
            job_seed=self._seed,
            check=self._grammar_check,
        )
        try:
            for index, resolved in enumerate(requests):
                if isinstance(resolved, RequestError):
                    raise RequestError(resolved.error_type, f"prompt {index}: {resolved}") from resolved
                message = resolved.message(self._next_uid)
                self._next_uid += len(message.requests)
                call.add(message, self._outputs.add_prompt(message, resolved), resolved.prompt_ids.tolist())
        except BaseException:
            self._outputs.abort(call.uids())  # nobody waits for the prompts before it
            raise
        self._num_prompts += len(inputs)
        return call

    def _run(self, call: Call, *, watch: bool = False) -> Iterator[OutputEvents]:
        """Drive the engine until every request of `call` has ended."""
        left = call.uids()
        try:
            self._begin(call, watch)
            while left:
                for events in self._tick():
                    left.difference_update(sample.uid for sample in events.finished)
                    yield events
        finally:
            with interrupts_held():
                aborts = self._outputs.abort(left).aborts
                if self._engine.is_usable:
                    self._inbox.append(AbortRequests(sorted(aborts)))
                    self._tick()  # its events are answers to what was just aborted

    def _begin(self, call: Call, watch: bool) -> None:
        if not self._has_given_vocabulary and any(prompt.constraint is not None for prompt in call.messages):
            self._inbox.append(self.tokenizer.vocabulary())
            self._has_given_vocabulary = True
        self._inbox.append(AddRequests(call.messages))
        if watch:
            for uid in call.uids():
                self._outputs.watch(uid)

    def _tick(self) -> list[OutputEvents]:
        """One tick, and what came of it. An interrupt waits for its end, so that the engine can go on."""
        found = []
        with interrupts_held():
            for message in self._engine.tick():
                match message:
                    case StepOutput():
                        events = self._outputs.process(message, time.perf_counter())
                    case RequestsRefused():
                        events = self._outputs.refuse(message)
                    case Ready():
                        continue
                if events.aborts:
                    self._inbox.append(AbortRequests(events.aborts))
                found.append(events)
        return found


def _close(engine: LocalEngine, check: GrammarCheck) -> None:
    check.close()
    engine.close()


def _each(choices: Sequence[Any], num_prompts: int) -> Sequence[Any]:
    """The choices of each prompt; what they hold is checked later."""
    if not isinstance(choices, Sequence) or all(isinstance(text, str) for text in choices):
        return [choices] * num_prompts
    if len(choices) != num_prompts:
        raise UsageError(f"choices: {len(choices)} lists were given for {count(num_prompts, 'prompt')}")
    return choices


def _layers(params: Params, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt."""
    layers = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * num_prompts
    if len(layers) != num_prompts:
        raise UsageError(f"sampling_params: {len(layers)} were given for {count(num_prompts, 'prompt')}")
    for layer in layers:
        if not isinstance(layer, SamplingParams):
            raise UsageError(f"sampling_params: must be SamplingParams, or a list with one per prompt, got {layer!r}")
    return layers
