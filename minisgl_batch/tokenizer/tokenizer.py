"""A model's tokenizer: prompts, chats and ids in, token ids out, and what its folder says about serving.

Texts are encoded as Hugging Face's `AutoTokenizer` does, with special tokens where the tokenizer adds them; a chat is
rendered by the model's template once, and gets no second BOS. Imports no torch. Called by the worker group's frontend
and by the in-process `LLM`; ranks load no tokenizer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import BPE

from minisgl_batch.chat_template import drop_tools
from minisgl_batch.errors import ModelError, RequestError
from minisgl_batch.hub import refuse_pointer
from minisgl_batch.messages import SetVocabulary
from minisgl_batch.reasoning import HARMONY, THINK
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.tokenizer.chat import NO_OPTIONS, ChatOptions, Message, first_line, render_chat, render_probe
from minisgl_batch.tokenizer.detokenizer import Detokenizer, make_detokenizer
from minisgl_batch.tokenizer.model_defaults import ModelDefaults, read_model_defaults

IntArray: TypeAlias = npt.NDArray[np.int32]
TokenIds: TypeAlias = tuple[int, ...]
PromptInput: TypeAlias = str | Sequence[int] | Sequence[Message]
"""A prompt as users give it: text, token ids, or chat messages."""

# Without any of them transformers 5 makes up a tokenizer that has hardly a token.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_TAIL_CHARS = 40
_LAST_TOKENS = 16  # enough for a mark and the white space behind it, in bytes if need be
_PROBE = "turn-end-probe"  # a text that no template holds itself


def is_chat(given: PromptInput) -> bool:
    """Whether a prompt is messages."""
    return not isinstance(given, str) and len(given) > 0 and isinstance(given[0], Mapping)


def hide_torch() -> None:
    """Keep torch out of this process, where transformers would import it for nothing (a second and 180 MB).

    For the `main` of a process that never computes; call it before anything imports transformers. An import of torch
    then fails as if it weren't installed.
    """
    sys.modules["torch"] = cast(Any, None)  # documented: makes `import torch` raise ModuleNotFoundError
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # else it warns that models can't be used


class ModelTokenizer:
    """The tokenizer of one model folder.

    Attributes:
        detokenizer: the way back.
        marks: what the model writes around its reasoning.
        whole_detokenizer: the way back where the text is to hold special tokens, too.
        eos_ids: ids that end generation, sorted: those of generation_config.json, config.json, the tokenizer, and the
            special token that the chat template puts behind an assistant's message.
        default_sampling: what generation_config.json recommends.
        max_len: the model's context in tokens.
        vocab_size: ids must be below it.
    """

    def __init__(self, hf_tokenizer: Any, defaults: ModelDefaults) -> None:
        """For a fast Hugging Face tokenizer; see `load`."""
        self._hf = hf_tokenizer
        self._fast: Tokenizer = hf_tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self.detokenizer: Detokenizer = make_detokenizer(self._fast)
        self.whole_detokenizer: Detokenizer = make_detokenizer(self._fast, skip_special_tokens=False)
        self.marks = THINK if None in map(self._fast.token_to_id, HARMONY.tokens) else HARMONY
        self.default_sampling: SamplingParams = defaults.sampling
        self._token_texts: dict[int, str] = {}
        self._words: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {(): ()}
        self.max_len = defaults.max_len
        self.vocab_size = defaults.vocab_size
        ends = {hf_tokenizer.eos_token_id, self._turn_end()} - {None}
        self.eos_ids: tuple[int, ...] = tuple(sorted(defaults.eos_ids | ends))

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Load the tokenizer of a model folder in Hugging Face format; nothing is downloaded.

        Raises:
            ModelError: the folder holds no usable tokenizer; names the folder and what is missing.
        """
        defaults = read_model_defaults(folder)
        vocabulary = [file for name in _VOCABULARY_FILES if (file := folder / name).is_file()]
        if not vocabulary:
            raise ModelError(f"{folder} holds no tokenizer: tokenizer.json is missing")
        for file in vocabulary:
            refuse_pointer(file)
        from transformers import AutoTokenizer  # the slow import of this package: not before it is needed

        try:
            # Never ask on the terminal whether to run the model's own code.
            hf_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a tokenizer may fail in any way
            raise ModelError(f"can't load a tokenizer from {folder}: {first_line(error)}") from error
        if not getattr(hf_tokenizer, "is_fast", False):
            raise ModelError(
                f"{folder} has only a slow tokenizer ({type(hf_tokenizer).__name__}): "
                "a tokenizer.json is needed (save_pretrained of a fast tokenizer writes one)"
            )
        return cls(hf_tokenizer, defaults)

    @property
    def hf_tokenizer(self) -> Any:
        """The Hugging Face tokenizer that this one is made of."""
        return self._hf

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def drops_tools(self) -> bool:
        """Whether the chat template, if there is one, takes no notice of tools."""
        return self.has_chat_template and drop_tools([str(self._hf.chat_template)])  # of several, of all

    def encode_prompt(self, text: str) -> IntArray:
        """(num_tokens,) int32 ids of a text, with BOS where the tokenizer adds it.

        Raises:
            RequestError: the text is no valid Unicode.
        """
        return self.encode_prompts([text])[0]

    def encode_prompts(self, texts: Sequence[str]) -> list[IntArray]:
        """`encode_prompt` of many, in parallel and without the GIL."""
        for text in texts:
            _check_unicode(text)
        return self._encode(texts, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[Message], system: str | None = None, options: ChatOptions = NO_OPTIONS
    ) -> IntArray:
        """(num_tokens,) int32 ids of a chat that the model shall answer. Arguments and errors as `render_chat`."""
        text = self.render_chat(messages, system, options)
        return self._encode([text], add_special_tokens=False)[0]

    def render_chat(
        self, messages: Sequence[Message], system: str | None = None, options: ChatOptions = NO_OPTIONS
    ) -> str:
        """The text of a chat up to where the model's answer begins.

        `system` is put in front of messages that have no system message.

        Raises:
            RequestError: the model has no chat template, or these messages don't suit it.
        """
        if not self.has_chat_template:
            raise RequestError(
                "invalid_request",
                "the model has no chat template: put one into its folder as chat_template.jinja, or give a prompt text "
                "instead of messages",
            )
        text = render_chat(self._hf, messages, system, options)
        _check_unicode(text)
        return text

    def encode_ids(self, token_ids: Sequence[int] | IntArray) -> IntArray:
        """(num_tokens,) int32 ids as given.

        Raises:
            RequestError: an id isn't a whole number in [0, vocab_size).
        """
        if len(token_ids) == 0:
            return np.empty(0, dtype=np.int32)
        try:
            ids = np.asarray(token_ids)
        except ValueError:  # lists of different lengths inside
            ids = np.empty(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("invalid_request", "token ids must be a flat list of whole numbers")
        self.check_ids(ids)
        return ids.astype(np.int32)

    def check_ids(self, token_ids: npt.NDArray[Any]) -> None:
        """Raise RequestError unless the model has all these ids (a tokenizer may have more tokens than its model)."""
        outside = (token_ids < 0) | (token_ids >= self.vocab_size)
        if outside.any():
            index = int(outside.argmax())
            raise RequestError(
                "invalid_request",
                f"token {index} of the prompt is {token_ids[index]}: ids of this model are in [0, {self.vocab_size})",
            )

    def encode_inputs(
        self,
        inputs: Sequence[PromptInput],
        *,
        system: str | None = None,
        options: Sequence[ChatOptions] | None = None,
    ) -> list[IntArray | RequestError]:
        """The ids of prompts of any kind, their texts in one batch; one that can't be used gives its error instead.

        Args:
            inputs: texts, token ids and chats, as they come.
            system: put in front of chats that have no system message.
            options: of each input, what the chat template gets beside its messages.
        """
        encoded: dict[int, IntArray | RequestError] = {}
        prompts: dict[int, str] = {}
        chats: dict[int, str] = {}
        for index, given in enumerate(inputs):
            asked = NO_OPTIONS if options is None else options[index]
            try:
                if is_chat(given):
                    chats[index] = self.render_chat(cast(Sequence[Message], given), system, asked)
                    continue
                asked.refuse_without_messages()
                if isinstance(given, str):
                    _check_unicode(given)
                    prompts[index] = given
                else:
                    encoded[index] = self.encode_ids(cast(Sequence[int], given))
            except RequestError as error:
                encoded[index] = error
        encoded |= self._encode_each(prompts, add_special_tokens=True)
        encoded |= self._encode_each(chats, add_special_tokens=False)
        return [encoded[index] for index in range(len(inputs))]

    def encode_choices(
        self, prompt: PromptInput, prompt_ids: IntArray, texts: Sequence[str]
    ) -> tuple[IntArray, list[IntArray]]:
        """The ids of a prompt and of each continuation of it, as lm-evaluation-harness splits them.

        White space at the end of a text belongs to what follows. Text and continuation are encoded together, and the
        tokens beyond those of the text by itself are the continuation's. Behind chats and token ids it is encoded by
        itself, without special tokens.

        Args:
            prompt, prompt_ids: as given to and as made by `encode_inputs`.

        Raises:
            RequestError: nothing is left of a continuation.
        """
        if isinstance(prompt, str):
            context = prompt.rstrip() or prompt
            if context != prompt:
                (prompt_ids,) = self._encode([context], add_special_tokens=True)
            continuations = [prompt[len(context) :] + text for text in texts]
            endings = self._endings_by_tail(context, prompt_ids, continuations) or [
                whole[len(prompt_ids) :]
                for whole in self._encode([context + text for text in continuations], add_special_tokens=True)
            ]
        else:
            endings = self._encode(texts, add_special_tokens=False)
        for index, ending in enumerate(endings):
            if not len(ending):
                raise RequestError(
                    "invalid_request",
                    f"choices[{index}]: {texts[index]!r} has no tokens of its own behind the prompt: let it begin "
                    "where a word does, or give the prompt as token ids",
                )
            self.check_ids(ending)
        return prompt_ids, endings

    def _endings_by_tail(
        self, context: str, context_ids: IntArray, continuations: Sequence[str]
    ) -> list[IntArray] | None:
        """What `encode_choices` needs of a text's continuations, from the text's last words; None if they don't tell.

        Tokens are those of byte-pair encoding if each two neighbours are. So where the tail by itself has the tokens
        that end the text, and keeps the first of them with a continuation behind it, all tokens before it stay, too.
        """
        space = context.rfind(" ", 0, max(0, len(context) - _TAIL_CHARS))
        if space < 0 or not isinstance(self._fast.model, BPE):
            return None
        for tail in (context[space:], context[space + 1 :]):  # some tokenizers put a space before a text
            texts = [tail, *(tail + text for text in continuations)]
            known, *wholes = self._encode(texts, add_special_tokens=False)
            is_end = np.array_equal(context_ids[-len(known) :], known)
            if is_end and all(len(whole) and whole[0] == known[0] for whole in wholes):
                return [whole[len(known) :] for whole in wholes]
        return None

    def encode_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that words are, as they begin a text and as they follow a space.

        Not all that a model can spell a word with: it may take other tokens than the tokenizer would.

        Raises:
            RequestError: nothing is left of a word.
        """
        known = self._words.get(words)
        if known is None:
            known = tuple(dict.fromkeys(ids for word in words for ids in self._spellings(word)))
            self._words = {words: known}  # most rows have those of the row before
        return known

    def token_text(self, token_id: int) -> str:
        """The text of a token by itself, special ones included; half a character is the replacement character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._fast.decode([token_id], skip_special_tokens=False)
        return text

    def encode_marks(self) -> tuple[TokenIds, TokenIds, TokenIds] | None:
        """The tokens of what stands before and behind reasoning, and before an answer without; None where a model may
        write these texts with other tokens."""
        marks = (self.marks.opening, self.marks.closing, self.marks.answering)
        opening, closing, answering = (tuple(ids.tolist()) for ids in self._encode(marks, add_special_tokens=False))
        if not self.marks.tokens and max(len(opening), len(closing)) > 1:
            return None
        return opening, closing, answering

    def vocabulary(self) -> SetVocabulary:
        """What the engine must know of tokens to constrain texts."""
        eos_ids = tuple(token for token in self.eos_ids if token < self.vocab_size)  # a model may lack some
        return SetVocabulary(self._fast.to_str(), self.vocab_size, eos_ids)

    def last_text(self, token_ids: IntArray) -> str:
        """The text of the last few tokens, special ones included."""
        return self._fast.decode(token_ids[-_LAST_TOKENS:].tolist(), skip_special_tokens=False)

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        stem = word.lstrip() or word
        plain, spaced = (tuple(ids.tolist()) for ids in self._encode([stem, f" {stem}"], add_special_tokens=False))
        if not plain:
            raise RequestError("invalid_request", f"bad_words: {word!r} has no tokens in this model")
        # What follows a space is often a token of its own, else the space is one.
        return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]

    def _encode_each(self, texts: Mapping[int, str], *, add_special_tokens: bool) -> dict[int, IntArray | RequestError]:
        """`_encode` of many; one that can't be encoded gives its error instead."""
        try:
            encoded = self._encode(list(texts.values()), add_special_tokens=add_special_tokens)
        except RequestError:
            return {i: self._encode_one(text, add_special_tokens=add_special_tokens) for i, text in texts.items()}
        return dict(zip(texts, encoded, strict=True))

    def _encode_one(self, text: str, *, add_special_tokens: bool) -> IntArray | RequestError:
        try:
            return self._encode([text], add_special_tokens=add_special_tokens)[0]
        except RequestError as error:
            return error

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[IntArray]:
        """The ids of texts.

        Raises:
            RequestError: one can't be encoded, such as a word that a tokenizer without an unknown token hasn't.
        """
        try:
            encodings = self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # tokenizers raises nothing more special
            raise RequestError(
                "invalid_request", f"the model's tokenizer can't encode this text: {first_line(error)}"
            ) from error
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _turn_end(self) -> int | None:
        """The special token right behind an assistant's message, when the chat template puts one there."""
        text = render_probe(self._hf, _PROBE) if self.has_chat_template else None
        if text is None or _PROBE not in text:
            return None  # a template for other kinds of chats says nothing about turns
        behind = text[text.rindex(_PROBE) + len(_PROBE) :].lstrip()
        try:
            (ids,) = self._encode([behind], add_special_tokens=False)
        except RequestError:
            return None
        token = self._fast.get_added_tokens_decoder().get(int(ids[0])) if len(ids) else None
        # gpt-oss may write several messages in a turn, each with an end.
        return int(ids[0]) if token is not None and token.special and token.content not in self.marks.tokens else None


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "invalid_request",
            f"the text holds half of a surrogate pair at character {error.start}: it is no valid Unicode",
        ) from error
