"""What the texts that options are given stand for; what can't be read is named. Called by `options`."""

from __future__ import annotations

import json
from typing import Any

import click

from minisgl_batch.cli.console import talk
from minisgl_batch.words import is_unicode

MAX_FILE_BYTES = 16 << 20  # of one that an option names: devices and wrong files may have no end


def token_ids(text: str) -> tuple[int, ...]:
    """Ids with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} isn't token ids such as 1,2") from None


def token_biases(text: str) -> dict[str, float]:
    """ID:BIAS with commas between them."""
    try:
        pairs = [(token.strip(), float(bias)) for token, bias in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise click.BadParameter(f"{text!r} isn't token ids with numbers such as 5:-100,7:2.5") from None
    if len(biases := dict(pairs)) < len(pairs):
        raise click.BadParameter(f"{text!r} names a token twice")
    return biases


def json_text(text: str) -> Any:
    """What a JSON text says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise click.BadParameter(f"{text!r} isn't JSON") from None


def json_file(path: str) -> Any:
    """What a JSON file or pipe of at most MAX_FILE_BYTES holds."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise click.BadParameter(f"can't read {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise click.BadParameter(f"{path} holds more than {MAX_FILE_BYTES >> 20} MiB: is it the right file?")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise click.BadParameter(f"{path} isn't JSON") from None


def schema_file(path: str) -> dict[str, Any]:
    """The JSON schema in a file."""
    schema = json_file(path)
    if not isinstance(schema, dict):
        raise click.BadParameter(f"{path} holds no JSON schema, which is an object")
    return schema


def several(_ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Texts as they were given; a list in one text is hardly meant."""
    if len(value) == 1 and "," in value[0]:
        option = param.opts[0]
        talk(f"warning: {option} {value[0]!r} is one text; give each its own: {option} ... {option} ...")
    return value


def valid_unicode(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
    """A text or several as they were given, if they can be stored and sent."""
    if not is_unicode("".join(value or ())):
        raise click.BadParameter(f"{value!r} isn't valid Unicode")
    return value
