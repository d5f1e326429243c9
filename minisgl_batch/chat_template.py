"""What a chat template's text tells without being rendered.

Called by the tokenizer and, where the engine isn't installed, by the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def drop_tools(templates: Iterable[str]) -> bool:
    """Whether a model has chat templates, and none of them takes notice of tools."""
    texts = list(templates)
    return bool(texts) and not any(re.search(r"\btools\b", text) for text in texts)
