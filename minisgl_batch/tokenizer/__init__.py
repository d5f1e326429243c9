"""Text on its way into the engine and out of it. No torch in here."""

from minisgl_batch.tokenizer.chat import ChatOptions
from minisgl_batch.tokenizer.detokenizer import Detokenizer, TextStream
from minisgl_batch.tokenizer.input import (
    ReasoningRules,
    ResolvedRequest,
    StopRules,
    derive_seed,
    resolve_request,
    resolve_requests,
)
from minisgl_batch.tokenizer.logprobs import Logprob, Logprobs
from minisgl_batch.tokenizer.output import FinishReason, OutputEvents, OutputProcessor, SampleOutput, TextDelta
from minisgl_batch.tokenizer.tokenizer import ModelTokenizer, PromptInput, hide_torch

__all__ = [
    "ChatOptions",
    "Detokenizer",
    "FinishReason",
    "Logprob",
    "Logprobs",
    "ModelTokenizer",
    "OutputEvents",
    "OutputProcessor",
    "PromptInput",
    "ReasoningRules",
    "ResolvedRequest",
    "SampleOutput",
    "StopRules",
    "TextDelta",
    "TextStream",
    "derive_seed",
    "hide_torch",
    "resolve_request",
    "resolve_requests",
]
