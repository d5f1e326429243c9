"""The exceptions that minisgl-batch raises on purpose.

Every message names the file, line, row or option at fault and says what to do. The command line prints the
message alone and exits with `exit_code`; a traceback is a defect of ours.
"""

from __future__ import annotations


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


class InvalidInputError(UsageError):
    """Raised when rows of an input can't be read or used, and the job was to refuse such rows."""


class ModelError(MiniSGLError):
    """Raised when a model can't be found or loaded, or doesn't fit into memory."""


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


class RedisFullError(QueueError):
    """Raised when Redis has no room (memory or disk) for what was to be added; nothing was changed."""


class SchemaVersionError(QueueError):
    """Raised when a job was written by a release whose records this one can't read."""


class JobNotFoundError(QueueError):
    """Raised when no job has the given id (finished jobs expire)."""


class JobStateError(QueueError):
    """Raised when a job isn't in a state that allows what was asked, such as retrying a running job."""


class WorkerError(MiniSGLError):
    """Raised when a worker group can't start, or dies more often than it may."""
