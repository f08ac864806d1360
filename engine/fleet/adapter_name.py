"""Adapters as the router names them."""

from __future__ import annotations

from ...adapters.identity import AdapterKey


def adapter_name(key: AdapterKey) -> str:
    """The key as one string."""
    return f"{key.tenant_id}/{key.digest}"
