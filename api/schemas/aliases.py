"""The bodies of an adapter's aliases, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from .adapters import CanaryView
from .request_model import RequestModel

VersionNumber = Annotated[int, Field(ge=1, le=999_999_999)]


class CanaryBody(RequestModel):
    """A part of the alias's requests goes to another version."""

    version: VersionNumber
    percent: Annotated[float, Field(gt=0, lt=100)]


class AliasBody(RequestModel):
    """What the alias shall mean, as a whole: a canary that is not named is over."""

    version: VersionNumber
    canary: CanaryBody | None = None

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"version": 3},
        {"version": 3, "canary": {"version": 4, "percent": 10.0}},
    )


class AliasView(msgspec.Struct, frozen=True):
    adapter: str
    alias: str
    version: int
    canary: CanaryView | None
    updated_at: datetime
    object: Literal["adapter.alias"] = "adapter.alias"


class AliasChangeView(msgspec.Struct, frozen=True):
    """One change of an alias, and what it meant from then on."""

    alias: str
    action: str
    """`set`, `canary`, `rollback` or `remove`."""
    version: int | None
    """None once it was removed."""
    canary: CanaryView | None
    changed_at: datetime
    changed_by: str | None
    """Who did it: `user:` and an e-mail address, `operator:` and a name, `key:` and the id of a key
    that is no user's, or `system`; null if that is unknown."""
    object: Literal["adapter.alias.change"] = "adapter.alias.change"
