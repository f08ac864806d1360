"""The published list of codes: complete, current, and the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterError, AdapterRejected
from loraplex.adapters.rejections import REJECTIONS
from loraplex.api.contract.error_codes import (
    BASE_CODES,
    ERROR_CODES,
    LINK_CODES,
    START_CODES,
    error_reference,
)
from loraplex.api.contract.errors import as_api_error, from_error_info
from loraplex.engine.errors import EngineError, InvalidParameter
from loraplex.engine.messages import ErrorInfo
from loraplex.platform.errors import BaseMismatch, ModelNotFound, PlatformError

NEVER_ANSWERED = {
    # The bases of the layers' errors; only their subclasses are raised.
    "adapter_error",
    "platform_error",
    # Raised in the engine's process or in commands, before there is anybody to answer.
    "database_revision_mismatch",
    "insecure_secret_file",
    "insufficient_memory",
    "row_security_missing",
    # Raised by commands.
    "key_not_found",
    "tenant_exists",
    "tenant_not_found",
    # Raised where blocks are fetched: whoever waits for one is answered `adapter_load_failed`.
    "object_corrupt",
    "object_not_found",
    # Carries the code of its reason.
    "adapter_rejected",
}


def all_subclasses(cls: type[Exception]) -> set[type[Exception]]:
    return {cls}.union(*(all_subclasses(sub) for sub in cls.__subclasses__()))


def test_every_code_that_a_layer_raises_is_published() -> None:
    errors = set().union(*map(all_subclasses, (EngineError, AdapterError, PlatformError)))
    raised = {error.code for error in errors}  # type: ignore[attr-defined]
    assert raised - NEVER_ANSWERED <= {*ERROR_CODES, *BASE_CODES, *START_CODES, *LINK_CODES}


def test_the_documentation_is_current() -> None:
    printed = Path(__file__).parents[2] / "docs" / "errors.md"
    assert printed.read_text() == error_reference(), (
        "run `python -m loraplex.api.contract.error_codes > docs/errors.md`"
    )


@pytest.mark.parametrize("code", sorted(ERROR_CODES))
def test_a_code_is_consistent(code: str) -> None:
    published = ERROR_CODES[code]
    assert 400 <= published.status < 600
    assert published.meaning.endswith((".", "`"))
    assert not (published.retryable and published.status in {400, 401, 403, 404, 413, 422})
    assert published.type.endswith("_error")


def test_a_rejection_is_answered_by_its_reason() -> None:
    for reason in REJECTIONS:
        error = as_api_error(AdapterRejected(reason, "because", pointer="a.b"))
        assert (error.code, error.message, error.param) == (reason, "because", "a.b")
        assert error.published.status == 422


def test_errors_of_the_layers_keep_their_words_and_their_parameter() -> None:
    missing = as_api_error(ModelNotFound("bot"))
    assert (missing.code, missing.published.status) == ("model_not_found", 404)
    assert "bot" in missing.message
    assert as_api_error(InvalidParameter("seed", "is odd")).param == "seed"
    assert as_api_error(BaseMismatch()).code == "base_mismatch"


def test_what_is_not_published_says_nothing_of_itself() -> None:
    for error in (
        as_api_error(RuntimeError("secret")),
        as_api_error(EngineErrorOfTomorrow("secret")),
        from_error_info(ErrorInfo("code_of_tomorrow", "secret")),
    ):
        assert error.code == "internal_error"
        assert "secret" not in error.message


class EngineErrorOfTomorrow(EngineError):
    """An error nobody has published."""

    code = "platform_error"  # known, and never answered
