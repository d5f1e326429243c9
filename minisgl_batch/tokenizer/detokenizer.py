"""From token ids back to text: whole rows at once, or a stream whose pieces add up to the same text.

Both equal Hugging Face's `decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)`, but for bytes
that are no characters: they spoil nothing beside them, so that a stream gives each character with its last token. Ids
without a token (a model's vocabulary may be padded) have no text. Behind a prompt's tokens the text begins with its
first space, which that decoding drops with some tokenizers. Knows nothing of requests or stop strings.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from copy import copy
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_REPLACE_EACH = "replace each byte"  # of what isn't UTF-8, as Hugging Face does


class TextStream(Protocol):
    """The text of one row while it grows."""

    def push(self, token_id: int) -> str:
        """The text that this token made final, often ""."""
        ...

    def flush(self) -> str:
        """The rest, now that no token follows; half a character becomes the replacement character."""
        ...


class Detokenizer(Protocol):
    """Text of one tokenizer's ids. Safe to share; each stream belongs to one row."""

    def decode_full(self, token_ids: Sequence[int]) -> str:
        """The text of all ids."""
        ...

    def stream(self) -> TextStream:
        """A new, empty stream."""
        ...

    def after(self, token_ids: Sequence[int]) -> Detokenizer:
        """One for texts that go on behind these tokens: they begin with their first token's space, if it has one."""
        ...


def make_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    """The detokenizer that fits the tokenizer's decoder.

    Args:
        skip_special_tokens: they have no text.
    """
    steps = _decoder_steps(tokenizer)
    silent = _special_tokens(tokenizer) if skip_special_tokens else frozenset()
    if steps == ["ByteLevel"]:
        return ByteLevelDetokenizer(tokenizer, silent)
    return WindowDetokenizer(tokenizer, silent, joins_bytes="ByteLevel" in steps, has_bytes="ByteFallback" in steps)


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen): a token is bytes, and the text is their UTF-8 decoding.

    Args:
        silent: tokens without text.
    """

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[str]) -> None:
        self._bytes = _TokenBytes(tokenizer, silent)

    def decode_full(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes.__getitem__, token_ids)).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        return _ByteLevelStream(self._bytes)

    def after(self, token_ids: Sequence[int]) -> Detokenizer:
        return self  # each token is its bytes, wherever it stands


class _ByteLevelStream:
    __slots__ = ("_bytes", "_utf8")

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._bytes = token_bytes
        self._utf8 = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TokenBytes(dict[int, bytes]):
    """The bytes of each id, found when first asked for: a vocabulary of 150,000 costs nothing at start-up."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[str]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._silent = silent
        self._alphabet = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._silent:
            value = b""
        elif all(char in self._alphabet for char in token):
            value = bytes(self._alphabet[char] for char in token)
        else:  # an added token, written as it is
            value = token.encode("utf-8")
        self[token_id] = value
        return value


class WindowDetokenizer:
    """For every other decoder, such as sentencepiece with byte fallback (Llama 2, Mistral, Gemma) or WordPiece.

    A token's text depends on what stands before it: leading spaces are stripped from the first one only. So a new token
    is decoded together with the one visible token before it; but fallback bytes are UTF-8.

    Args:
        silent: tokens without text: all special ones, or none.
        joins_bytes: tokens may be a part of a character's bytes, in GPT-2's alphabet.
        has_bytes: tokens may be fallback bytes, such as <0x0A>.
    """

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[str], *, joins_bytes: bool, has_bytes: bool) -> None:
        self._tokenizer = tokenizer
        self._kinds = _TokenKinds(tokenizer, silent, has_bytes)
        self._skips_special = bool(silent)
        self._joins_bytes = joins_bytes
        self._before: list[int] = []  # a token before the text, or none

    def decode_full(self, token_ids: Sequence[int]) -> str:
        text = self._decode([*self._before, *token_ids])[len(self._decode(self._before)) :]
        if REPLACEMENT not in text:
            return text
        stream = self.stream()  # among bytes that are no characters there may be some that are
        return "".join([*map(stream.push, token_ids), stream.flush()])

    def stream(self) -> TextStream:
        return _WindowStream(self._tokenizer, self._kinds, self._joins_bytes, self._before)

    def after(self, token_ids: Sequence[int]) -> Detokenizer:
        shown = (token for token in reversed(token_ids) if self._kinds[token] == _TEXT)
        # Half a character would be another's half.
        before = next((token for token in shown if REPLACEMENT not in self._decode([token])), None)
        behind = copy(self)
        behind._before = [] if before is None else [before]
        return behind

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)
        return text


_SILENT, _TEXT = -2, -1  # kinds of tokens; others are a byte's value


class _WindowStream:
    """`_window` = [the last token whose text is out, if any] + [those whose text is not out]; bytes go another way."""

    __slots__ = ("_joins_bytes", "_kinds", "_prefix", "_tokenizer", "_utf8", "_window")

    def __init__(self, tokenizer: Tokenizer, kinds: _TokenKinds, joins_bytes: bool, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._kinds = kinds
        self._joins_bytes = joins_bytes
        self._utf8 = _Utf8Decoder(_REPLACE_EACH)
        self._window = before.copy()
        self._prefix = self._decode()  # text of the window's token that is out, decoded alone

    def push(self, token_id: int) -> str:
        kind = self._kinds[token_id]
        if kind == _SILENT:
            return ""
        if kind != _TEXT:
            return self._push_byte(token_id, kind)
        half = self._utf8.decode(b"", final=True)
        self._window.append(token_id)
        text = self._decode()
        # Only decoders that join the bytes of several tokens can end with half a character here.
        if not text.startswith(self._prefix) or (self._joins_bytes and text.endswith(REPLACEMENT)):
            return half
        new_text = text[len(self._prefix) :]
        self._show(token_id)
        return half + new_text

    def flush(self) -> str:
        return self._decode()[len(self._prefix) :] + self._utf8.decode(b"", final=True)

    def _push_byte(self, token_id: int, byte: int) -> str:
        is_first = not self._window
        held = self._decode()[len(self._prefix) :] if len(self._window) > 1 else ""
        self._show(token_id)
        if is_first and byte == ord(" "):
            return self._prefix  # which may have lost it
        return held + self._utf8.decode(bytes([byte]))

    def _show(self, token_id: int) -> None:
        """The text of all tokens up to this one is out, or half a character's."""
        self._window = [token_id]
        self._prefix = self._decode()

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=False)  # none is here that has no text
        return text


class _TokenKinds(dict[int, int]):
    """Of each id, found when first asked for: without text, with text, or a fallback byte."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[str], has_bytes: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._silent = silent
        self._has_bytes = has_bytes

    def __missing__(self, token_id: int) -> int:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._silent:
            kind = _SILENT
        elif self._has_bytes and _FALLBACK_BYTE.fullmatch(token):
            kind = int(token[1:-1], 16)
        else:
            kind = _TEXT
        self[token_id] = kind
        return kind


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_REPLACE_EACH, _replace_each)


def _decoder_steps(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())  # its part of tokenizer.json
    return [step["type"] for step in state.get("decoders", [state])]


def _special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """Those that Hugging Face's decoding leaves out."""
    return frozenset(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable ones stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
