"""Fills a prompt template from the fields of a row: 'Translate: {text}'.

A field is a plain name in braces; `{{` and `}}` are literal braces. There are no attributes, indices, conversions or
format specs, so that a template can't reach anything but the row's own values. Called by the row reader.
"""

from __future__ import annotations

import json
import string
from typing import Any

from minisgl_batch.errors import InvalidParameterError
from minisgl_jobs.faults import FieldError


class PromptTemplate:
    """A parsed template.

    Attributes:
        names: the fields it uses.

    Raises:
        InvalidParameterError: it isn't well-formed, uses no field, or uses more than plain names.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str | None]] = []  # literal text, then the field that follows it
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise InvalidParameterError("template", f"{error} in {text!r}; write literal braces as {{{{ }}}}") from None
        for literal, name, spec, conversion in parsed:
            if name is not None and (not name or spec or conversion or any(c in name for c in ".[]{}")):
                raise InvalidParameterError(
                    "template",
                    f"a field is a plain name in braces, such as {{text}}; got {text!r} (literal braces: {{{{ }}}})",
                )
            self._parts.append((literal, name))
        self.names = frozenset(name for _, name in self._parts if name is not None)
        if not self.names:
            raise InvalidParameterError(
                "template", f"uses no field of the rows: write one, such as {{text}}, into {text!r}"
            )

    def fill(self, fields: dict[str, Any]) -> str:
        """The text for one row: strings as they are, other values as JSON.

        Raises:
            FieldError: the row lacks a field.
        """
        pieces: list[str] = []
        for literal, name in self._parts:
            pieces.append(literal)
            if name is None:
                continue
            value = fields.get(name)
            if value is None:
                problem = "is null" if name in fields else "is missing"
                raise FieldError(name, f"{problem}; the template uses it", "add it, or change the template")
            pieces.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return "".join(pieces)
