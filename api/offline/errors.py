"""The errors of the offline classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from ...adapters.errors import AdapterError, AdapterRejected
from ...adapters.rejections import REJECTIONS
from ...engine.errors import EngineError
from ..contract.errors import ApiError, as_api_error


class LLMError(Exception):
    """Something cannot be done as asked; the text ends with the code.

    `code` is one of docs/errors.md, `param` the argument or field at fault, if one is.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.param = param


def llm_error(error: Exception, *, where: str | None = None) -> LLMError:
    """The error of any layer. `where`: what it is about, which the message then begins with."""
    code, message, param = _described(error)
    if where is not None:
        message = f"{where}: {message.removeprefix('prompts: ')}"
    return LLMError(code, message, param=param)


def _described(error: Exception) -> tuple[str, str, str | None]:
    """The code, the message and the field at fault."""
    match error:
        case AdapterRejected():
            known = REJECTIONS.get(error.reason)
            message = f"{error} {known.way_out}" if known else str(error)
            return error.reason, message, error.pointer
        case AdapterError():
            return error.code, str(error), error.pointer
        case EngineError():
            return error.code, str(error), getattr(error, "param", None)
    published = as_api_error(error)
    return published.code, published.message, published.param


@contextmanager
def raising_llm_errors(where: str | None = None) -> Iterator[None]:
    """Raise the errors of all layers as LLMError."""
    try:
        yield
    except (AdapterError, ApiError, EngineError, ValidationError) as exc:
        raise llm_error(exc, where=where) from exc
