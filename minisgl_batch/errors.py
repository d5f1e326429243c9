"""The exceptions that minisgl-batch raises on purpose.

Every message names the file, line, row or option at fault and says what to do. The command line prints the
message alone and exits with `exit_code`; a traceback is a defect of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class MiniSGLError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UsageError(MiniSGLError):
    """Raised when an option or an argument is wrong, or when options contradict each other."""

    exit_code = 2


class InvalidParameterError(UsageError, ValueError):
    """Raised when one named parameter has a value that can't be used.

    `field` is the parameter's name, as the user wrote it; the message doesn't repeat it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.reason = message


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in an input.

    Attributes:
        file: the input's name, as the user gave it.
        line: from 1.
        field: the name or path of the field at fault, such as "body.messages[2].role"; "" is the line as a whole.
        problem: what is wrong; follows the field's name in a sentence.
        hint: what to do.
        place: how to name the line where its number alone doesn't say it, such as "part-1.csv:7" or "row 7".
    """

    file: str
    line: int
    field: str
    problem: str
    hint: str
    place: str = ""


class InvalidInputError(UsageError):
    """Raised when an input can't be read, or when rows of it can't be used and the job was to refuse such rows.

    `faults` are the first of the `num_faults` faulty rows; both are empty when the input as a whole is at fault. The
    message lists the same.
    """

    def __init__(self, message: str, faults: Sequence[Fault] = (), num_faults: int = 0) -> None:
        super().__init__(message)
        self.faults = tuple(faults)
        self.num_faults = num_faults


class InputUnreachableError(InvalidInputError):
    """Raised when this machine can't open or read an input, or may not; another worker may."""


class InputUnavailableError(InputUnreachableError):
    """Raised when an input can't be read now: its store doesn't answer, or a disk fails."""

    exit_code = 1


class StoreUnavailableError(UsageError):
    """Raised when the store that a URL is in doesn't answer."""

    exit_code = 1


class ModelError(UsageError):
    """Raised when a model can't be used: there is none, or its files aren't what they should be."""


class ModelUnavailableError(ModelError):
    """Raised when a model can't be used here and now: the hub doesn't answer, or memory is short."""

    exit_code = 1


class ModelNotFoundError(ModelError):
    """Raised when no folder and no model of the hub has the given name."""


class RequestError(MiniSGLError):
    """Raised when one row can't be served, such as a prompt longer than the model's context.

    `error_type` is the word that the row's `error_type` column gets.
    """

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class QueueError(MiniSGLError):
    """Base of the errors of jobs and of the queue in Redis."""


class RedisUnavailableError(QueueError):
    """Raised when Redis can't be reached, refuses the login or is too old."""

    exit_code = 4


class RedisFullError(QueueError):
    """Raised when Redis has no room (memory or disk) for what was to be added; nothing was changed."""

    exit_code = 4


class SchemaVersionError(QueueError):
    """Raised when a job was written by a release whose records this one can't read."""

    exit_code = 5


class DamagedJobError(QueueError):
    """Raised when what Redis holds of a job or a worker can't have been written by this package."""


class JobNotFoundError(QueueError):
    """Raised when no job has the given id (finished jobs expire)."""

    exit_code = 3


class JobStateError(QueueError):
    """Raised when a job isn't in a state that allows what was asked, such as retrying a running job."""


class JobExistsError(JobStateError, UsageError):
    """Raised when a new job is given the id of another one."""


class JobTimeoutError(QueueError, TimeoutError):
    """Raised when a job hasn't ended within the time that the caller would wait; it goes on.

    `job_id` names it, and `state` is the state that it was in.
    """

    def __init__(self, job_id: str, state: str, timeout_s: float) -> None:
        super().__init__(f"job {job_id} is still {state} after {timeout_s:g} s")
        self.job_id = job_id
        self.state = state
        self.timeout_s = timeout_s


class TaskRefusedError(QueueError):
    """Raised when an RQ task names a function that workers don't run."""


class OutputError(MiniSGLError):
    """Raised when a dataset's folder can't be written or read: a full disk, no permission, a missing part."""


class OutputDeniedError(OutputError):
    """Raised when a folder can't be written from here, however much room there is: others may, or nobody."""


class OutputDamagedError(OutputError):
    """Raised when a part of a dataset isn't what was written: trying again is of no use."""


class OutputTakenError(OutputError, UsageError):
    """Raised when a new job can't have a folder for its output: it holds other data."""


class OutputLostError(OutputError):
    """Raised when a job's output folder is another job's by now, so that nothing of its own may be there."""


class OutputNotAllowedError(OutputError):
    """Raised when a worker may not write where a job wants its dataset; another worker may."""


class WorkerError(MiniSGLError):
    """Raised when a worker group can't start, or dies more often than it may."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLostError(WorkerError):
    """Raised by a tensor-parallel rank whose group lost another rank: the other one's error says why."""

    EXIT_CODE = 75  # tells whoever started the ranks that this isn't the first error

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=self.EXIT_CODE)
