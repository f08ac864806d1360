"""Schemas of sign-in and sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SecretStr, StringConstraints

from ...platform.accounts.passwords import MAX_PASSWORD_LENGTH, MIN_PASSWORD_LENGTH
from ...platform.accounts.tokens import MAX_TOKEN_LENGTH
from ...platform.names import MAX_SLUG_LENGTH
from ...platform.users.models import MAX_EMAIL_LENGTH
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel

Password = Annotated[SecretStr, Field(min_length=1, max_length=MAX_PASSWORD_LENGTH)]
"""As somebody types it, right or wrong."""
NewPassword = Annotated[
    SecretStr, Field(min_length=MIN_PASSWORD_LENGTH, max_length=MAX_PASSWORD_LENGTH)
]


class SignInBody(RequestModel):
    """Credentials for a sign-in."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_EMAIL_LENGTH)]
    """An operator's name, or a user's email address."""
    password: Password
    tenant: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SLUG_LENGTH)] | None = (
        None
    )
    """The user's tenant; null for an operator."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"name": "ben@acme.example", "password": "correct horse battery", "tenant": "acme"},
        {"name": "root", "password": "correct horse battery", "tenant": None},
    )


class EnrolmentBody(RequestModel):
    """A new password, set with an invitation."""

    token: Annotated[SecretStr, Field(min_length=1, max_length=MAX_TOKEN_LENGTH)]
    password: NewPassword

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"token": "lpx_join_" + "0" * 43, "password": "correct horse battery"},
    )


class ConfirmationBody(RequestModel):
    """Confirmation of the current password."""

    password: Password

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"password": "correct horse battery"},)


class PasswordBody(RequestModel):
    """A change of the password."""

    current: Password
    new: NewPassword

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"current": "correct horse battery", "new": "staple battery horse"},
    )


@dataclass(frozen=True, slots=True)
class ServedView(AnswerModel):
    """Information about the server for the console."""

    version: str
    base_model: str
    """The base model's name in requests."""
    grammars: bool
    """Whether requests can have a schema or grammar."""


@dataclass(frozen=True, slots=True)
class SessionView(AnswerModel):
    """The signed-in account and the session's permissions."""

    kind: Literal["operator", "user"]
    name: str
    tenant: str | None
    """Its slug; null for an operator without a tenant."""
    role: str
    scopes: Sequence[str]
    """Scopes in the tenant; for an operator without a tenant, in any tenant."""
    csrf_token: str
    """Required as `X-CSRF-Token` in every request with a method other than GET."""
    expires_at: datetime
    """When it expires, regardless of use."""
    idle_seconds: int
    """It expires earlier after this time without a request."""
    confirmed_until: datetime | None
    """Until then, actions that require a recent password confirmation are allowed."""
    server: ServedView
    object: Literal["session"] = "session"


@dataclass(frozen=True, slots=True)
class InvitationView(AnswerModel):
    """An invitation to set a password; valid once, until this time."""

    token: str
    """Only in this response."""
    expires_at: datetime
    url: str
    """The console's link for it."""
    object: Literal["invitation"] = "invitation"
