"""What a retry keeps of the dataset that it improves: the results of the old parts that are no errors.

Knows nothing of Redis. Called by frontends, which generate the others only, and by finalise.
"""

from __future__ import annotations

import logging

from minisgl_batch.errors import OutputError
from minisgl_jobs.model import EngineInfo, RowResult
from minisgl_jobs.parts import part_name, read_part, read_part_table
from minisgl_jobs.places import Place
from minisgl_jobs.results import table_to_results

logger = logging.getLogger(__name__)


def results_to_keep(folder: Place, chunk: int, input_sha256: str) -> tuple[list[RowResult], list[EngineInfo]]:
    """The results without an error in a chunk's part of an earlier epoch, and their engines; none of other rows.

    A part that is missing or damaged has none either: all rows of its chunk are generated.
    """
    path = folder / part_name(chunk)
    if not path.exists():  # its chunk was not begun
        return [], []
    try:
        info = read_part(path).info
        if info.input_sha256 != input_sha256:
            logger.warning("%s holds results of other rows: they are generated again", path)
            return [], []
        results = [result for result in table_to_results(read_part_table(path)) if result.error is None]
        return results, info.engines if results else []
    except OutputError as error:
        logger.warning("all rows of chunk %d are generated again: %s", chunk, error)
        return [], []
