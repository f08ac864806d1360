"""The exit codes of the commands. They are stable, because scripts rely on them."""

from __future__ import annotations

from enum import IntEnum

from ...engine.errors import EngineError, InsufficientMemory, InvalidParameter, UnsupportedModel
from ...platform import errors
from ..client.errors import (
    ApiRefused,
    ClientError,
    FileExists,
    InvalidAdapter,
    InvalidArgument,
    KeyUnusable,
    NotFound,
    ServerUnreachable,
    SourceDenied,
    SourceUnavailable,
    UnexpectedAnswer,
)


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    """For a reason that none of the others names."""
    USAGE = 2
    """The command line or a value on it is wrong."""
    AUTHENTICATION = 3
    """The key is missing, wrong or may not do this."""
    NOT_FOUND = 4
    CONFLICT = 5
    """It is there already, or in a state that does not allow this."""
    INVALID_ADAPTER = 6
    """The adapter cannot be served."""
    UNAVAILABLE = 7
    """The server, database or store is not there, or not ready; try again."""
    INTERRUPTED = 130
    """By ^C; the output says how to resume."""


class CommandFailed(Exception):
    """A command cannot do what it was asked: its message for the terminal, and the exit code."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_STATUS_CODES = {
    400: ExitCode.USAGE,
    401: ExitCode.AUTHENTICATION,
    403: ExitCode.AUTHENTICATION,
    404: ExitCode.NOT_FOUND,
    409: ExitCode.CONFLICT,
    412: ExitCode.CONFLICT,
    422: ExitCode.INVALID_ADAPTER,
}
"""Of error answers."""

_EXIT_CODES: tuple[tuple[ExitCode, tuple[type[Exception], ...]], ...] = (
    (ExitCode.USAGE, (InvalidArgument,)),
    (ExitCode.AUTHENTICATION, (KeyUnusable, SourceDenied)),
    (ExitCode.NOT_FOUND, (NotFound,)),
    (ExitCode.CONFLICT, (FileExists,)),
    (ExitCode.INVALID_ADAPTER, (InvalidAdapter,)),
    (ExitCode.UNAVAILABLE, (ServerUnreachable, UnexpectedAnswer, SourceUnavailable)),
    (ExitCode.USAGE, (errors.InvalidValue, errors.InsecureSecretFile)),
    (ExitCode.USAGE, (InvalidParameter, UnsupportedModel, InsufficientMemory)),
    (ExitCode.NOT_FOUND, (errors.TenantNotFound, errors.KeyNotFound)),
    (ExitCode.CONFLICT, (errors.TenantExists, errors.OperatorExists)),
    (ExitCode.UNAVAILABLE, (errors.DatabaseUnavailable, errors.RevisionMismatch, EngineError)),
    (ExitCode.UNAVAILABLE, (errors.RowSecurityMissing,)),
)
"""Of the errors of the client, and of commands that work on the database or a model directly; the
first that fits counts."""


def exit_code_of(
    error: errors.PlatformError | EngineError | ClientError | CommandFailed,
) -> ExitCode:
    """The exit code for this kind of error."""
    if isinstance(error, CommandFailed):
        return error.exit_code
    if isinstance(error, ApiRefused):
        fallback = ExitCode.UNAVAILABLE if error.status >= 500 else ExitCode.FAILED
        return _STATUS_CODES.get(error.status, fallback)
    for exit_code, kinds in _EXIT_CODES:
        if isinstance(error, kinds):
            return exit_code
    return ExitCode.FAILED
