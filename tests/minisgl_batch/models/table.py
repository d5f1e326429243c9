"""The table of docs/models.md, made from the supported architectures and the tests' cases. Called by `tests.tables`."""

from __future__ import annotations

from minisgl_batch.models.families import MODELS
from tests.minisgl_batch.engine import test_parity
from tests.minisgl_batch.models import test_dense, test_long_context, test_tensor_parallel
from tests.minisgl_batch.models.hf import FAMILIES, WITH_IMAGES
from tests.tables import markdown


def family_of(architecture: str) -> str:
    """What the tests call it."""
    models = {family: model for family, (*_, model) in (FAMILIES | WITH_IMAGES).items()}
    return next(family for family, model in models.items() if model.__name__ == architecture)


def cases_of(family: str) -> list[str]:
    """What its logits are compared for, besides its plain form."""
    names = [name for name, (of, _) in test_dense.CASES.items() if of == family]
    long = [f"{name} at 4 times the length" for name, (of, _) in test_long_context.CASES.items() if of == family]
    return [name.removeprefix(f"{family}, ") for name in names if name != family] + long


def has_plain_case(family: str) -> bool:
    return any(of == family for of, _ in test_dense.CASES.values())


def is_split(family: str) -> bool:
    return any(of == family for of, _ in test_tensor_parallel.CASES.values())


def is_served(family: str) -> bool:
    return family in {*test_parity.FAMILIES, *test_parity.WINDOWED}


def compared_models() -> str:
    """What is supported, and what each architecture's tests compare."""
    rows = [
        (
            f"`{architecture}`",
            MODELS[architecture],
            "; ".join(cases_of(family)),
            "yes" if is_split(family) else "",
            "yes" if is_served(family) else "",
        )
        for architecture in sorted(MODELS)
        for family in [family_of(architecture)]
    ]
    return markdown(
        ("architecture", "models", "variants whose logits are compared", "2 and 4 ranks", "whole engine"), rows
    )
