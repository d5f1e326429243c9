"""Runs a bench by name: python -m tests.bench NAME [its options]; without a name it lists them all."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def benches() -> dict[str, str]:
    """Name -> first line of its documentation, of all modules here that can be run."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path != Path(__file__) and 'if __name__ == "__main__":' in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main() -> int:
    found = benches()
    if len(sys.argv) < 2 or sys.argv[1] not in found:
        print(
            "usage: python -m tests.bench NAME [options]\n", *(f"\n  {name:24}{what}" for name, what in found.items())
        )
        return 0 if len(sys.argv) < 2 else 2
    name = sys.argv.pop(1)
    runpy.run_module(f"tests.bench.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
