"""How one row is sampled: the fields users set, and the concrete values that the engine gets.

`SamplingParams` is what rows, jobs and callers give: `None` means "not given". Layers of it are merged (row over job
over the model's own generation config) and then resolved once. Knows nothing of tokenizers, models or torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.words import is_unicode

MAX_TOKENS_LIMIT = 1 << 24  # no model's context comes near; larger values are typing mistakes
MIN_TEMPERATURE = 1e-5  # below, noise would drown in rounding: such rows are greedy
MAX_SEED = (1 << 63) - 1
MAX_N = 1024
MAX_STOP_STRINGS = 64
MAX_TOKEN_ID = (1 << 31) - 1


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameterError(field, f"must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise InvalidParameterError(field, f"must be between {low} and {high}, got {value}")


def _check_float(field: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameterError(field, f"must be a number, got {value!r}")
    if not low <= value <= high or (low_open and value == low):  # also refuses NaN
        opening = "(" if low_open else "["
        raise InvalidParameterError(field, f"must be in {opening}{low:g}, {high:g}], got {value}")


def _check_bool(field: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise InvalidParameterError(field, f"must be true or false, got {value!r}")


def _check_stop(stop: object) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    if strings is None:
        return
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise InvalidParameterError("stop", f"must be a string or a list of strings, got {stop!r}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidParameterError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    if not all(strings):
        raise InvalidParameterError("stop", "must not hold an empty string")
    for string in strings:
        if not is_unicode(string):
            raise InvalidParameterError("stop", f"isn't valid Unicode: {string!r}")


def _check_stop_token_ids(token_ids: object) -> None:
    if token_ids is None:
        return
    if not isinstance(token_ids, list | tuple):
        raise InvalidParameterError("stop_token_ids", f"must be a list of token ids, got {token_ids!r}")
    for token_id in token_ids:
        _check_int("stop_token_ids", token_id, 0, MAX_TOKEN_ID)


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """What a user may set for a row; the names are those of vLLM and of the OpenAI API.

    Attributes:
        n: samples per prompt, each a row of its own in the result.
        temperature: 0 is greedy (exact argmax).
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less probable than this share of the most probable one, in [0, 1].
        seed: makes the row's samples repeatable; without it one is derived from the job's seed and the row's index.
        max_tokens: most tokens to generate; without it, up to the model's context.
        stop: the text is cut before the first of these strings (a single string may be given).
        stop_token_ids: generation ends at any of these tokens.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens`.
        include_stop_str_in_output: keep the stop string that ended the text.

    Raises:
        InvalidParameterError: a value is out of its range; names the field.
    """

    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("top_k", self.top_k, -1, MAX_TOKEN_ID)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        self._normalise()

    def _normalise(self) -> None:
        """One form for equal values, so that equal params compare, hash and serialise alike."""
        for field in ("temperature", "top_p", "min_p"):
            if isinstance(value := getattr(self, field), int):
                msgspec.structs.force_setattr(self, field, float(value))
        for field in ("stop", "stop_token_ids"):
            if isinstance(value := getattr(self, field), list):
                msgspec.structs.force_setattr(self, field, tuple(value))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when not given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These values where given, else those of `defaults`."""
        given = {f: v for f in self.__struct_fields__ if (v := getattr(self, f)) is not None}
        return msgspec.structs.replace(defaults, **given) if given else defaults

    def to_dict(self) -> dict[str, Any]:
        """The fields that were given, JSON-ready."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


NEUTRAL = SamplingParams(
    n=1,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    ignore_eos=False,
    include_stop_str_in_output=False,
)
"""What holds when neither row nor job nor the model's generation config says anything (the values of vLLM)."""


class EngineSampling(msgspec.Struct, frozen=True, array_like=True):
    """The concrete values that the engine samples one request with.

    Attributes:
        max_tokens: most tokens to generate; the engine cuts it to what the context leaves.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p, min_p: 1 and 0 keep all.
        seed: 63-bit; the noise of a token depends on (seed, sample_index, output position) alone.
        sample_index: which of the row's `n` samples this is.
        stop_ids: tokens that end the request: the model's end-of-sequence ids (unless the row ignores them) and the
            row's `stop_token_ids`. They travel with the request because ranks load no tokenizer.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    stop_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1
