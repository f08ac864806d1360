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
MAX_CODE_LENGTH = 4096
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


class FlowBody(RequestModel):
    """The beginning of a sign-in through the identity provider."""

    again: bool = False
    """Whether people have to authenticate even if they are signed in at the provider. The session
    is then confirmed."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"again": True})


class CallbackBody(RequestModel):
    """What the identity provider added to the address of the console's page."""

    code: Annotated[SecretStr, Field(min_length=1, max_length=MAX_CODE_LENGTH)]
    state: Annotated[str, StringConstraints(min_length=1, max_length=MAX_CODE_LENGTH)]

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"code": "SplxlOBeZQQYbYS6WxSbIA", "state": "0" * 64},
    )


@dataclass(frozen=True, slots=True)
class FlowView(AnswerModel):
    """A sign-in through the identity provider that has begun."""

    url: str
    """Where the browser goes next."""
    object: Literal["sign_in_flow"] = "sign_in_flow"


@dataclass(frozen=True, slots=True)
class IdentityProviderView(AnswerModel):
    """The identity provider of this server."""

    name: str | None
    """Null: people sign in with passwords only."""
    object: Literal["identity_provider"] = "identity_provider"


@dataclass(frozen=True, slots=True)
class SignOutView(AnswerModel):
    """The browser's session at the identity provider."""

    url: str | None
    """Where the browser ends it; null: the provider publishes no such address, or is away."""
    object: Literal["sign_out"] = "sign_out"


@dataclass(frozen=True, slots=True)
class ServedView(AnswerModel):
    """Information about the server for the console."""

    version: str
    base_model: str
    """The base model's name in requests."""
    grammars: bool
    """Whether requests can have a schema or grammar."""
    tuning: bool
    """Whether fine-tuning jobs can be created and resumed."""


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
    """Until then, actions that require a recent confirmation are allowed."""
    signed_in_with: Literal["password", "provider"]
    """How the session was opened, and how it is confirmed."""
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
