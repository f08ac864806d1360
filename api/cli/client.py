"""The API client of the commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..client.api_client import ApiClient, api_path, connect
from ..client.connection import Connection
from ..client.errors import ApiRefused
from .connection import find_connection

__all__ = ["ApiClient", "api_path", "open_client"]


@contextmanager
def open_client(connection: Connection | None = None) -> Iterator[ApiClient]:
    """The client of this connection, or of the one that the command means. Raises ClientError."""
    found = connection or find_connection()
    with connect(found) as client:
        try:
            yield ApiClient(client, found.url, tenant=found.tenant)
        except ApiRefused as exc:
            if exc.code == "tenant_required":
                exc.with_hint("Add --tenant SLUG, or set LORAPLEX_TENANT.")
            raise
