"""Schemas of `/v1/webhooks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from ...platform.webhooks.event_types import DeliveryState, EventType
from ...platform.webhooks.models import MAX_DESCRIPTION_LENGTH
from ...platform.webhooks.target import MAX_URL_LENGTH
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel

WebhookUrl = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_LENGTH)]
Events = Annotated[list[EventType], Field(min_length=1)]
Description = Annotated[str, StringConstraints(min_length=1, max_length=MAX_DESCRIPTION_LENGTH)]


class WebhookBody(RequestModel):
    """A webhook to create."""

    url: WebhookUrl
    """`https://name[:port][/path][?query]`, of a host that the operator has listed."""
    events: Events | None = None
    """The types of events to send; null: all, including future ones."""
    description: Description | None = None

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "url": "https://hooks.acme.example/loraplex",
            "events": ["version.ready", "version.rejected"],
        },
    )


class WebhookChange(RequestModel):
    """Omitted fields stay unchanged."""

    url: WebhookUrl = ""
    """As when it is created."""
    events: Events | None = None
    """Null: all."""
    description: Description | None = None
    disabled: bool = False
    """A disabled webhook receives no events. Enabling it again also ends a row of failures."""

    is_change: ClassVar[bool] = True
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"disabled": True},)


@dataclass(frozen=True, slots=True)
class WebhookView(AnswerModel):
    """A webhook, without its secret."""

    volatile: ClassVar[tuple[str, ...]] = ("failing_since", "dropped_events")

    id: str
    url: str
    events: Annotated[
        Sequence[str] | None, Field(description="The types that are sent; null: all.")
    ]
    description: str | None
    created_at: datetime
    created_by: Annotated[str, Field(description="Creator, as `kind:id`.")]
    disabled_at: datetime | None
    disabled_by: Annotated[
        Literal["caller", "failures", "receiver"] | None,
        Field(
            description="`failures`: no event could be delivered for two days; `receiver`: it "
            "answered 410."
        ),
    ]
    failing_since: Annotated[
        datetime | None,
        Field(description="The first failed attempt after the last successful one."),
    ]
    dropped_events: Annotated[
        int, Field(description="Events that were not kept, because too many were pending.")
    ]
    previous_secret_until: Annotated[
        datetime | None,
        Field(description="Until then events are also signed with the previous secret."),
    ]
    object: Literal["webhook"] = "webhook"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedWebhookView(WebhookView):
    """A webhook with its new secret."""

    secret: str
    """The secret that signs events; only in this response."""


@dataclass(frozen=True, slots=True)
class DeliveryView(AnswerModel):
    """An event for a webhook."""

    id: str
    event: str
    """The event's id: the header `webhook-id`, the same in every attempt."""
    type: str
    state: DeliveryState
    attempts: int
    created_at: datetime
    next_attempt_at: datetime | None
    """Null: it has ended."""
    ended_at: datetime | None
    last_status: int | None
    """HTTP status of the last answer."""
    last_failure: str | None
    """Why the last attempt failed."""
    object: Literal["webhook.delivery"] = "webhook.delivery"
