"""The bodies of signing in, and what is answered about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, SecretStr, StringConstraints

from ...platform.accounts.passwords import MAX_PASSWORD_LENGTH, MIN_PASSWORD_LENGTH
from ...platform.accounts.tokens import MAX_TOKEN_LENGTH
from ...platform.names import MAX_SLUG_LENGTH
from ...platform.users.models import MAX_EMAIL_LENGTH
from .request_model import RequestModel

Password = Annotated[SecretStr, Field(min_length=1, max_length=MAX_PASSWORD_LENGTH)]
"""As somebody types it, right or wrong."""
NewPassword = Annotated[
    SecretStr, Field(min_length=MIN_PASSWORD_LENGTH, max_length=MAX_PASSWORD_LENGTH)
]


class SignInBody(RequestModel):
    """Who signs in."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_EMAIL_LENGTH)]
    """An operator's name, or a user's address."""
    password: Password
    tenant: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SLUG_LENGTH)] | None = (
        None
    )
    """The user's; null for an operator."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"name": "ben@acme.example", "password": "correct horse battery", "tenant": "acme"},
        {"name": "root", "password": "correct horse battery", "tenant": None},
    )


class EnrolmentBody(RequestModel):
    """A new password for whoever has the invitation."""

    token: Annotated[SecretStr, Field(min_length=1, max_length=MAX_TOKEN_LENGTH)]
    password: NewPassword

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"token": "lpx_join_" + "0" * 43, "password": "correct horse battery"},
    )


class ConfirmationBody(RequestModel):
    """That it is still the same person."""

    password: Password

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"password": "correct horse battery"},)


class PasswordBody(RequestModel):
    """Another password in the place of the present one."""

    current: Password
    new: NewPassword

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"current": "correct horse battery", "new": "staple battery horse"},
    )


class ServedView(msgspec.Struct, frozen=True):
    """What the server is, as far as its console has to know."""

    version: str
    base_model: str
    """What callers name the base model."""
    grammars: bool
    """Whether requests may have a schema or grammar."""


class SessionView(msgspec.Struct, frozen=True):
    """Who is signed in, and what the session may do."""

    kind: Literal["operator", "user"]
    name: str
    tenant: str | None
    """Its slug; null for an operator who acts on none."""
    role: str
    scopes: Sequence[str]
    """In the tenant; of an operator who acts on none: in any tenant that it names."""
    csrf_token: str
    """What `X-CSRF-Token` of every request with another method than GET has to be."""
    expires_at: datetime
    """When it ends, however much it is used."""
    idle_seconds: int
    """After so long without a request it ends earlier."""
    confirmed_until: datetime | None
    """Until then it may also do what needs the password anew."""
    server: ServedView
    object: Literal["session"] = "session"


class InvitationView(msgspec.Struct, frozen=True):
    """How somebody sets a password: once, and until then."""

    token: str
    """In this answer, and never again."""
    expires_at: datetime
    url: str
    """Where the console takes it."""
    object: Literal["invitation"] = "invitation"
