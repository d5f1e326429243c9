"""Which algorithm each matrix product runs by, kept in a file.

Later starts needn't time the algorithms again, and compute the same bits. Knows no cuBLASLt: an algorithm is some
bytes, and a key says what it is for. Called by `matmul`.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_FORMAT = 1

Choices = dict[str, bytes | None]  # None: torch's own


class AlgorithmFile:
    """Choices by key, in JSON. Several processes may use it at once.

    Args:
        path: of the file, which need not be there.
        algorithm_bytes: length of every algorithm.
    """

    def __init__(self, path: Path, algorithm_bytes: int) -> None:
        self._path = path
        self._algorithm_bytes = algorithm_bytes

    def read(self) -> Choices:
        """All choices; none, with a line in the log, if the file is damaged or something else."""
        try:
            return self._parse(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            logger.warning("%s can't be read, and is made anew: %s", self._path, error)
            return {}

    def add(self, choices: Mapping[str, bytes | None]) -> Choices:
        """Write what isn't there yet; returns all choices, where others' that came first stay.

        Two that add at the same moment may lose one's choices, which are then made again at the next start.
        """
        merged = {**choices, **self.read()}
        texts = {key: algorithm and algorithm.hex() for key, algorithm in sorted(merged.items())}
        try:
            self._write(json.dumps({"format": _FORMAT, "algorithms": texts}, indent=1))
        except OSError as error:
            logger.warning("%s can't be written: the next start chooses algorithms again: %s", self._path, error)
        return merged

    def _parse(self, text: bytes) -> Choices:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError("it has another format")
        algorithms = content.get("algorithms")
        if not isinstance(algorithms, dict):
            raise ValueError("it holds no object of algorithms")
        choices: Choices = {}
        for key, algorithm in algorithms.items():
            choices[key] = found = None if algorithm is None else bytes.fromhex(str(algorithm))
            if found is not None and len(found) != self._algorithm_bytes:
                raise ValueError(f"the algorithm for {key} has another length")
        return choices

    def _write(self, text: str) -> None:
        """Elsewhere, then renamed: nobody reads half a file."""
        with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
            written = Path(folder) / self._path.name
            written.write_text(text, encoding="utf-8")
            written.replace(self._path)
