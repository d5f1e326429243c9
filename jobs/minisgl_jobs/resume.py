"""Going on with a dataset that is in the output folder: whether this job made it, and which chunks are there.

A job is the same when its rows are, by position and content, and what shapes their answers. It keeps its id and its
seed. All of that stands in the folder, so it doesn't matter whether Redis still knows the job. Knows nothing of Redis.
Called by submissions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl_batch.errors import OutputError, OutputTakenError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.words import one_line
from minisgl_jobs.dataset import Manifest, read_manifest
from minisgl_jobs.kept import column_types
from minisgl_jobs.model import EngineInfo, JobSpec
from minisgl_jobs.owner import read_owner
from minisgl_jobs.parts import PartInfo, distinct, num_ok, part_names, read_part
from minisgl_jobs.places import Place

logger = logging.getLogger(__name__)

ROWS, NUM_ROWS = "rows", "number of rows"
_WHAT_TO_DO = "choose another folder, or overwrite it with `overwrite`"


@dataclass(frozen=True)
class Earlier:
    """The job whose output a folder holds.

    Attributes:
        job_id, seed, epoch, chunk_rows: the job's.
        facts: what makes it this job, by the names of the options.
        is_complete: whether all rows are there.
    """

    job_id: str
    seed: int
    epoch: int
    chunk_rows: int
    facts: Mapping[str, Any]
    is_complete: bool

    def check(self, folder: Place, facts: Mapping[str, Any]) -> None:
        """Make sure that these facts are the earlier job's.

        Raises:
            OutputError: some differ; names them.
        """
        differences = [
            f"{name} is {_show(value)} and was {_show(self.facts[name])}"
            for name, value in facts.items()
            if name != ROWS and value != self.facts[name]
        ]
        if facts.get(NUM_ROWS, 0) > self.facts[NUM_ROWS]:
            differences.append("a dataset can't be extended, as by a larger `limit`")
        if differences:
            self.refuse(folder, "; ".join(differences))

    def refuse(self, folder: Place, difference: str) -> None:
        """Raise the OutputTakenError that names a difference."""
        raise OutputTakenError(
            f"{folder} holds the output of job {self.job_id}, which is another: {difference}; {_WHAT_TO_DO}"
        )


@dataclass(frozen=True)
class Resumption:
    """What a job finds of itself in its output.

    Attributes:
        epoch: for the parts that it will write.
        done: chunk whose part is there and stays as it is -> its rows that have failed.
        num_failed, error_types: rows that have failed, in the parts of all whole chunks, and how.
        num_rows: rows that aren't generated again, those of unfinished chunks included.
        is_complete: whether nothing is left to do: all parts and `_SUCCESS` are there.
        engines: what has generated these rows.
    """

    epoch: int
    done: Mapping[int, int]
    num_failed: int = 0
    error_types: Collection[str] = ()
    num_rows: int = 0
    is_complete: bool = False
    engines: Sequence[EngineInfo] = ()

    @property
    def num_retried(self) -> int:
        """Rows of whole chunks that have failed and run again."""
        return self.num_failed - sum(self.done.values())


def find_earlier(folder: Place) -> Earlier | None:
    """The job whose output is in a folder, if that says so.

    Raises:
        OutputError: the folder can't be read.
        SchemaVersionError: another release wrote it.
    """
    spec = read_owner(folder)
    manifest = read_manifest(folder)
    if spec is not None:
        epoch = manifest.epoch if manifest is not None else -1
        return Earlier(spec.job_id, spec.seed, epoch, spec.chunk_rows, spec_facts(spec), is_complete=False)
    if manifest is None:
        return None
    kept = (manifest.job_id, manifest.seed, manifest.epoch, manifest.chunk_rows)
    return Earlier(*kept, _manifest_facts(manifest), manifest.is_complete)


def spec_facts(spec: JobSpec) -> dict[str, Any]:
    """What makes a job that job."""
    return {
        **option_facts(spec.model, spec.params, spec.system, token_ids=spec.token_ids),
        "keep_columns": column_types(spec.kept),
        NUM_ROWS: spec.num_rows,
        ROWS: spec.rows_sha256,
    }


def option_facts(model: str, params: SamplingParams, system: str | None, *, token_ids: bool) -> dict[str, Any]:
    """Those facts that are known before the rows are."""
    sampling = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    return {"model": model, **sampling, "system": system, "token_ids": token_ids}


def resume(
    folder: Place, earlier: Earlier, spec: JobSpec, hashes: Sequence[bytes], *, retry_failed: bool = False
) -> Resumption:
    """What is there of a job whose rows have all been read.

    Args:
        hashes: `chunk_sha256` of each of its chunks, raw.
        retry_failed: whether chunks with rows that have failed are to run again; of these the other rows stay.

    Raises:
        OutputError: it is another job; says what differs.
    """
    facts = spec_facts(spec)
    earlier.check(folder, facts)
    parts = [info for info in _parts(folder) if info.job_id == earlier.job_id]
    if facts[ROWS] != earlier.facts[ROWS]:
        earlier.refuse(folder, f"its rows differ{_first_difference(spec, parts, hashes)}")
    epoch = 1 + max([earlier.epoch, *(info.epoch for info in parts)])
    ours = [info for info in parts if info.chunk < len(hashes) and info.input_sha256 == hashes[info.chunk].hex()]
    whole = [info for info in ours if info.is_whole]
    done = {info.chunk: info.num_failed for info in whole if not (retry_failed and info.num_failed)}
    kept = [info for info in ours if info.chunk in done or _has_ok(info)]
    return Resumption(
        epoch,
        done,
        num_failed=sum(info.num_failed for info in whole),
        error_types={name for info in whole for name in info.num_by_error_type},
        num_rows=sum(num_ok(info, spec.chunk_range(info.chunk)) for info in ours) + sum(done.values()),
        is_complete=earlier.is_complete and len(done) == spec.num_chunks,
        engines=distinct(engine for info in kept for engine in info.engines),
    )


def engine_differences(there: Sequence[EngineInfo], now: Sequence[EngineInfo]) -> str:
    """What engines that have generated rows differ in from those that will: `dtype was float32 and is bfloat16`.

    "" when these are among them, or when nothing is known of either.
    """
    old, new = next((engine for engine in there if engine not in now), None), next(iter(now), None)
    if old is None or new is None:
        return ""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(one_line(f"{name} was {old.get(name)} and is {new.get(name)}") for name in names)


def _has_ok(info: PartInfo) -> bool:
    """Whether a part has results without an error; a row that isn't finished may have some."""
    return info.num_rows > sum(info.num_by_error_type.values())


def _parts(folder: Place) -> list[PartInfo]:
    """Those that can be read; the rows of others are generated again."""
    found = (_part_info(folder / name) for name in part_names(folder))
    return [info for info in found if info is not None]


def _part_info(path: Place) -> PartInfo | None:
    try:
        return read_part(path).info
    except OutputError as error:
        logger.warning("its rows are generated again: %s", error)
        return None


def _first_difference(spec: JobSpec, parts: Sequence[PartInfo], hashes: Sequence[bytes]) -> str:
    """Which rows, as far as the parts that are there tell."""
    for info in parts:
        if info.input_sha256 and (info.chunk >= len(hashes) or info.input_sha256 != hashes[info.chunk].hex()):
            rows = spec.chunk_range(info.chunk)
            return f", first among row_index {rows.start} to {rows.stop - 1}"
    return ""


def _manifest_facts(manifest: Manifest) -> dict[str, Any]:
    options = (manifest.model, manifest.sampling, manifest.system)
    return {
        **option_facts(*options, token_ids=manifest.token_ids),
        "keep_columns": manifest.kept_columns,
        NUM_ROWS: manifest.num_rows,
        ROWS: manifest.rows_sha256,
    }


def _show(value: Any) -> str:
    return "not given" if value is None else msgspec.json.encode(value).decode()
