"""Errors about adapters. The class docstring is the default message; `code` is published."""

from __future__ import annotations

from typing import ClassVar


class AdapterError(Exception):
    """Something is wrong with an adapter."""

    code: ClassVar[str] = "adapter_error"

    def __init__(self, message: str | None = None, *, pointer: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)
        self.pointer = pointer
        """The tensor or configuration field at fault, if one is."""


class AdapterRejected(AdapterError):
    """The adapter cannot be served.

    Raised by intake with the `reason` a caller can act on, one of the codes in `docs/errors.md`.
    """

    code = "adapter_rejected"

    def __init__(self, reason: str, message: str, *, pointer: str | None = None) -> None:
        super().__init__(message, pointer=pointer)
        self.reason = reason


class IntakeUnavailable(AdapterError):
    """The server could not examine the adapter. The uploaded bytes are kept: commit the upload
    again."""

    code = "intake_unavailable"


class ConfinementMissing(AdapterError):
    """A part of the confinement required by `--require-confinement` is not in force."""

    code = "confinement_missing"


class AdapterUnavailable(AdapterError):
    """The adapter's weights could not be loaded to the device."""

    code = "adapter_load_failed"


class ObjectNotFound(AdapterError):
    """The store has no object under this key."""

    code = "object_not_found"


class ObjectCorrupt(AdapterError):
    """The stored object's bytes do not match its digest."""

    code = "object_corrupt"


class StoreUnavailable(AdapterError):
    """The adapter store did not answer in time."""

    code = "store_unavailable"


class StoreDenied(AdapterError):
    """The adapter store denies this server access."""

    code = "store_denied"


class StorageFull(AdapterError):
    """The server's disk is full: the remaining space is reserved for the database."""

    code = "storage_full"


class NotComposable(AdapterError):
    """The adapter has more than LoRA matrices: only A and B can be added to another adapter's."""

    code = "adapter_not_composable"


class ArenaTooSmall(AdapterError):
    """The adapter is larger than the whole device arena."""

    code = "adapter_too_large"
