"""The errors of the client."""

from __future__ import annotations

from typing import Self


class ClientError(Exception):
    """What could not be done, and why.

    `code` is a published code of the API for an error answer, else the class's own. `message` is
    for people. The text of the error is the message with the hints.
    """

    code = "client_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.hints: tuple[str, ...] = ()

    def with_hint(self, hint: str) -> Self:
        """This error, with one more sentence at its end that says what to do."""
        self.hints = (*self.hints, hint)
        return self

    def __str__(self) -> str:
        parts = (self._head(), *self.hints)
        return ". ".join((*(part.removesuffix(".") for part in parts[:-1]), parts[-1]))

    def _head(self) -> str:
        return self.message


class ApiRefused(ClientError):
    """The error answer of a server. `status` is that of HTTP."""

    code = "refused"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int = 0,
        param: str | None = None,
        is_retryable: bool = False,
        request_id: str | None = None,
    ) -> None:
        """`param` is the field that is wrong; `is_retryable`: the same may succeed later."""
        super().__init__(message, code=code)
        self.status = status
        self.param = param
        self.is_retryable = is_retryable
        self.request_id = request_id

    def _head(self) -> str:
        return f"{self.message} ({self.code})"


class ServerUnreachable(ClientError):
    """The connection could not be made, or broke."""

    code = "server_unreachable"


class UnexpectedAnswer(ClientError):
    """The responder is not a Loraplex server, or is one of another version."""

    code = "unexpected_answer"


class InvalidArgument(ClientError):
    """A value that the caller gave is not of the form that is needed."""

    code = "invalid_argument"


class KeyUnusable(ClientError):
    """There is no API key, or it is malformed."""

    code = "key_unusable"


class InvalidAdapter(ClientError):
    """The files are no adapter that can be served; of a rejected version with the reason's code."""

    code = "invalid_adapter"


class NotFound(ClientError):
    """Something that the caller named is not there."""

    code = "not_found"


class SourceDenied(ClientError):
    """A hub or an object store refuses access to what the caller wants to push."""

    code = "source_denied"


class SourceUnavailable(ClientError):
    """A hub or an object store cannot be reached, or failed."""

    code = "source_unavailable"


class FileExists(ClientError):
    """A file would be overwritten."""

    code = "file_exists"
