"""What the text of a row must be: JSON of a schema, a match of a regular expression, one of some texts, or a grammar's.

The names are those of vLLM's `structured_outputs` and of the OpenAI API's `response_format`. Checks the shape of what
users give; whether a schema, an expression or a grammar can be used, only a worker can tell.
"""
# ruff: noqa: SIM905 - a list of plain words reads better as text

from __future__ import annotations

from typing import Any

import msgspec

from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.other_fields import NamedFields
from minisgl_batch.param_checks import check_json, check_strings
from minisgl_batch.words import is_unicode

FIELD = "structured_outputs"
MAX_CHOICE_TEXTS = 4096
MAX_GRAMMAR_BYTES = 128 << 10
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# JSON Schema's, of all drafts: those that hold a text to something, or may; and those that only say something about it.
_KEYWORDS = frozenset(
    "type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern format "
    "items additionalItems prefixItems unevaluatedItems contains maxContains minContains maxItems minItems uniqueItems "
    "properties patternProperties additionalProperties unevaluatedProperties propertyNames required maxProperties "
    "minProperties dependencies dependentRequired dependentSchemas allOf anyOf oneOf not if then else definitions "
    "contentEncoding contentMediaType contentSchema".split()
)
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_WRAPPERS = ("schema", "json_schema", "json")


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, metaclass=NamedFields
):
    """One of the first five; without any of them the text is free, also where a job says otherwise.

    Attributes:
        json: a JSON schema, as an object or as its text.
        regex: a regular expression that all of the text matches, in the syntax of Rust's `regex`: no look-around and
            no back-references.
        choice: the text is one of these.
        grammar: a context-free grammar, in the Lark syntax of llguidance or as GBNF.
        json_object: any JSON object.
        disable_any_whitespace: of JSON: no white space between its parts.

    Raises:
        InvalidParameterError: a value can't be used, or several contradict each other; names `structured_outputs`.
            Or there is no such argument; names that.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None

    def __post_init__(self) -> None:
        given = self.kinds
        if len(given) > 1:
            raise InvalidParameterError(FIELD, f"{given[0]} and {given[1]} contradict each other: give one of them")
        for flag in ("json_object", "disable_any_whitespace"):
            if not isinstance(value := getattr(self, flag), bool | None):
                raise InvalidParameterError(FIELD, f"{flag} must be true or false, got {value!r}")
        self._check_choice()
        for kind in ("regex", "grammar"):
            self._check_text(kind, getattr(self, kind))
        if self.json is not None:
            _check_size("json", msgspec.json.encode(_read_schema(self.json)))
        if self.disable_any_whitespace and given and given[0] not in ("json", "json_object"):
            raise InvalidParameterError(FIELD, f"disable_any_whitespace says nothing beside {given[0]}")

    @property
    def kinds(self) -> list[str]:
        """Which of the five are given."""
        return [kind for kind in _KINDS if (value := getattr(self, kind)) is not None and value is not False]

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema, if that is what is given."""
        if self.json_object:
            return {"type": "object"}
        schema: dict[str, Any] | None = msgspec.json.decode(self.json) if isinstance(self.json, str) else self.json
        return schema

    @classmethod
    def read(cls, given: object) -> StructuredOutputsParams:
        """From what stands in a row or in a call.

        Raises:
            InvalidParameterError: it can't be used.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise InvalidParameterError(FIELD, f'must be an object such as {{"json": {{...}}}}, got {given!r}')
        if unknown := [key for key in given if key not in cls.__struct_fields__]:
            raise InvalidParameterError(FIELD, f"{unknown[0]!r} isn't one of {', '.join(cls.__struct_fields__)}")
        return cls(**given)

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        if not isinstance(self.choice, list | tuple) or not self.choice:
            raise InvalidParameterError(FIELD, f"choice must be a list of at least one text, got {self.choice!r}")
        check_strings(FIELD, self.choice, MAX_CHOICE_TEXTS)
        _check_size("choice", "".join(self.choice).encode())
        msgspec.structs.force_setattr(self, "choice", tuple(self.choice))

    def _check_text(self, kind: str, text: object) -> None:
        if text is None:
            return
        if not isinstance(text, str) or not text or not is_unicode(text):
            raise InvalidParameterError(FIELD, f"{kind} must be a text that isn't empty, got {text!r}")
        _check_size(kind, text.encode())


def read_response_format(given: object) -> StructuredOutputsParams:
    """The same from a `response_format` of the OpenAI API.

    Raises:
        InvalidParameterError: it can't be used; names `response_format`.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return StructuredOutputsParams()
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if not isinstance(given, dict) or kind != "json_schema":
        raise InvalidParameterError(
            "response_format", f'must be an object whose type is "text", "json_object" or "json_schema", got {given!r}'
        )
    inside = given.get("json_schema")
    schema = inside.get("schema") if isinstance(inside, dict) else None
    if not isinstance(schema, dict):
        raise InvalidParameterError("response_format", f"json_schema must hold a schema, got {inside!r}")
    try:
        return StructuredOutputsParams(json=schema)
    except InvalidParameterError as error:
        raise InvalidParameterError("response_format", error.reason) from None


def _read_schema(given: object) -> dict[str, Any]:
    schema = given
    if isinstance(given, str):
        _check_size("json", given.encode(errors="replace"))
        try:
            schema = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
            raise InvalidParameterError(FIELD, f"json isn't valid JSON: {error}") from None
    if not isinstance(schema, dict):
        hint = ": give its model_json_schema()" if hasattr(given, "model_json_schema") else ""
        raise InvalidParameterError(FIELD, f"json must be a JSON schema, which is an object, got {given!r}{hint}")
    check_json(FIELD, schema)
    _refuse_nothing(schema)
    return schema


def _refuse_nothing(schema: dict[str, Any]) -> None:
    """Refuse what isn't a schema but has one inside, or was mistyped: nothing in it would hold a text to anything."""
    if schema.get("type") != "json_schema" and any(key in _KEYWORDS or key.startswith("$") for key in schema):
        return
    for key in _WRAPPERS:
        if isinstance(schema.get(key), dict):
            raise InvalidParameterError(FIELD, f"json has the schema inside {key!r}: give what stands there, alone")
    if unknown := [key for key in schema if key not in _NOTES and not key.startswith("x-")]:
        raise InvalidParameterError(FIELD, f"json has no keyword of JSON Schema; {unknown[0]!r} isn't one")


def _check_size(kind: str, text: bytes) -> None:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidParameterError(
            FIELD, f"{kind} has {len(text):,} bytes, which is more than {MAX_GRAMMAR_BYTES:,}: make it smaller"
        )
