"""The types of events, and the states of their deliveries."""

from __future__ import annotations

from enum import StrEnum


class EventType(StrEnum):
    """What a webhook reports."""

    VERSION_READY = "version.ready"
    VERSION_REJECTED = "version.rejected"
    VERSION_DELETED = "version.deleted"
    """The content is removed from every tier; with the receipt."""
    ALIAS_CHANGED = "alias.changed"
    """Set, split by a canary, rolled back or removed."""
    ALIAS_ROLLED_BACK = "alias.rolled_back"
    """A canary exceeded its limits and ended by itself; an `alias.changed` precedes it."""
    BATCH_ENDED = "batch.ended"
    JOB_SUCCEEDED = "job.succeeded"
    """A fine-tuning job has made a version."""
    JOB_FAILED = "job.failed"
    JOB_PAUSED = "job.paused"
    """By its owner, or because of a limit of the tenant."""
    JOB_RESUMED = "job.resumed"
    """It waits for its turn again."""
    EVALUATION_FINISHED = "evaluation.finished"
    """It has succeeded, with a regression or not, has failed or was cancelled."""
    BUDGET_ALERT = "budget.alert"
    TENANT_DELETED = "tenant.deleted"
    """No tier holds its adapters and files any more; the webhooks are removed next."""


TEST = "webhook.test"
"""The type of an event that is sent to one webhook on request."""


class DeliveryState(StrEnum):
    """The state of a delivery."""

    PENDING = "pending"
    """To be sent, for the first time or again."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """Given up: too many attempts, or too old."""


class Failure(StrEnum):
    """Why an attempt failed."""

    STATUS = "status"
    """The answer's status was not 2xx."""
    REDIRECT = "redirect"
    """The answer was a redirect, which is not followed."""
    GONE = "gone"
    """The answer's status was 410: the receiver wants no more events."""
    TIMEOUT = "timeout"
    NAME_NOT_RESOLVED = "name_not_resolved"
    ADDRESS_NOT_ALLOWED = "address_not_allowed"
    """An address of the host is not public and not in the operator's networks."""
    HOST_NOT_ALLOWED = "host_not_allowed"
    """The operator has removed the host from the list."""
    CERTIFICATE_INVALID = "certificate_invalid"
    CONNECTION_FAILED = "connection_failed"
    """No connection, or it was lost before the status."""
    ANSWER_INVALID = "answer_invalid"
    """The answer is not HTTP/1.1, or its headers are too large."""


class DisabledBy(StrEnum):
    """Why a webhook receives no events."""

    CALLER = "caller"
    FAILURES = "failures"
    """No event could be delivered for two days."""
    RECEIVER = "receiver"
    """It answered 410."""
