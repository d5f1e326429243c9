"""Which job has an output folder: `_JOB` names it from its start, or its retry's, until it has ended.

The file appears or not as a whole, so of several jobs that want a folder one gets it. Knows nothing of Redis, nor of
datasets. Called by clients, and by `dataset` for all others.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import msgspec

from minisgl_batch.errors import OutputError, OutputTakenError
from minisgl_jobs.model import JobSpec, decode_record
from minisgl_jobs.parts import remove_file, write_file
from minisgl_jobs.places import Place, create, make_folder, move, remove

OWNER = "_JOB"  # holds the id of the job that writes here
ASIDE = f".{OWNER}."  # begins its name on the way out


def claim_output(folder: Place, job_id: str, spec: JobSpec | None = None) -> None:
    """Make a folder the output of one job until it has ended: two would overwrite each other's parts.

    Args:
        spec: the job, for `read_owner`, as long as there is no manifest that tells it.

    Raises:
        OutputError: another job has it, or it can't be written.
    """
    record = b"" if spec is None else b"\n" + msgspec.json.encode(spec) + b"\n"
    try:
        make_folder(folder)
        create(folder / OWNER, job_id.encode() + record)
    except FileExistsError:
        if (owner := output_owner(folder)) != job_id:
            raise OutputTakenError(f"{folder} holds the output of job {owner}, which hasn't ended") from None
        if spec is not None and read_owner(folder) is None:
            write_file(folder / OWNER, job_id.encode() + record)
    except OSError as error:
        raise OutputError(f"{folder} can't be written: {error.strerror}") from error


def take_output(folder: Place, job_id: str, owner: str) -> None:
    """As `claim_output`, in place of a job that will never write here again.

    Args:
        owner: that job, "" for none. Of several that take the folder from it at once one gets it.

    Raises:
        OutputTakenError: another job has the folder by now. OutputError: it can't be written.
    """
    if owner not in ("", job_id):
        aside = folder / f"{ASIDE}{secrets.token_hex(8)}"
        try:
            move(folder / OWNER, aside)
            content = aside.read_bytes()
            if content.partition(b"\n")[0].decode() != owner:  # somebody was faster: give it back
                with suppress(FileExistsError):
                    create(folder / OWNER, content)
            remove(aside)
        except FileNotFoundError:
            pass  # somebody else takes it
        except OSError as error:
            raise OutputError(f"{folder} can't be written: {error.strerror}") from error
    claim_output(folder, job_id)


def output_owner(folder: Place) -> str:
    """The job whose output this is until it has ended, "" for none.

    Raises:
        OutputError: the folder can't be read.
    """
    try:
        return (folder / OWNER).read_bytes().partition(b"\n")[0].decode()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise OutputError(f"{folder / OWNER} can't be read: {error.strerror}") from error


def read_owner(folder: Place) -> JobSpec | None:
    """The job whose output this is until it has ended; None for none, or where that isn't told.

    Raises:
        OutputError: the folder can't be read.
        SchemaVersionError: another release wrote it.
    """
    path = folder / OWNER
    try:
        record = path.read_bytes().partition(b"\n")[2]
        return decode_record(record, JobSpec, str(path)) if record else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise OutputError(f"{path} can't be read: {error}") from error


def release_output(folder: Place, job_id: str) -> None:
    """Undo `claim_output`; a folder that another job has stays as it is.

    Raises:
        OutputError: the folder can't be written.
    """
    if output_owner(folder) == job_id:
        remove_file(folder / OWNER)
