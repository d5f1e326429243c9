"""Help in sections, so that everyday options don't drown among those of the engine; types with plain messages."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

EVERYDAY = "Options"


class SectionOption(click.Option):
    """An option that stands in a section of its own in the help."""

    def __init__(self, *args: Any, section: str = EVERYDAY, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """What a message calls the option: its variable, if that is where the value is from."""
        if ctx is not None and ctx.get_parameter_source(self.name or "") is ParameterSource.ENVIRONMENT:
            return f"the variable {self.envvar}"
        return super().get_error_hint(ctx)


class SectionedCommand(click.Command):
    """A command whose help has a section for each that its options name, everyday options first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {EVERYDAY: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "section", EVERYDAY), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class WholeNumber(click.IntRange):
    """click's own calls what isn't a number `not a valid integer range`."""

    name = "whole number"


class Number(click.FloatRange):
    """The same; and NaN lies in no range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number
