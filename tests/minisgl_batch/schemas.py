"""Random JSON schemas of a small family, and whether a value is one of theirs: a reference of a few lines."""

from __future__ import annotations

import random
import re
from typing import Any

from minisgl_batch.words import is_unicode


def random_schema(depth: int = 2) -> dict[str, Any]:
    kinds = ["integer", "enum", "boolean", "pattern", "string", "const"] + (
        ["object", "array", "anyOf"] if depth else []
    )
    match random.choice(kinds):
        case "integer":
            low = random.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 300)}
        case "enum":
            return {"enum": random.sample([1, None, "yes", "é\n", 'a"b', True, -3.5], 3)}
        case "const":
            return {"const": random.choice(["x y", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": random.choice(["^[a-c]{1,3}$", "^(cat|dog)s?$", r"^\d\d-\d$"])}
        case "string":
            return {"type": "string", "maxLength": random.randint(0, 5)}
        case "array":
            low = random.randint(0, 2)
            items = random_schema(depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + random.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(depth - 1), random_schema(depth - 1)]}
        case "object":
            names = random.sample(["a", "b c", "é", "d"], random.randint(1, 3))
            properties = {name: random_schema(depth - 1) for name in names}
            required = random.sample(names, random.randint(0, len(names)))
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case kind:
            return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(fits(value, part) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(type(value) is type(one) and value == one for one in schema.get("enum", [schema.get("const")]))
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "string":
            if not isinstance(value, str) or not is_unicode(value):
                return False
            pattern = schema.get("pattern")
            return len(value) <= schema.get("maxLength", 99) and (pattern is None or bool(re.search(pattern, value)))
        case "array":
            sizes = range(schema["minItems"], schema["maxItems"] + 1)
            return isinstance(value, list) and len(value) in sizes and all(fits(v, schema["items"]) for v in value)
        case "object":
            properties = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= value.keys() <= properties.keys()
                and all(fits(v, properties[name]) for name, v in value.items())
            )
    raise AssertionError(schema)
