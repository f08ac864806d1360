"""Loraplex: one quantized base model, thousands of tenants' LoRA adapters, every batch mixed."""

from typing import TYPE_CHECKING, Any

from .platform.version import __version__ as __version__

if TYPE_CHECKING:
    from .api.client.client import Client as Client
    from .api.client.errors import ClientError as ClientError

_LAZY = {"Client": ".api.client.client", "ClientError": ".api.client.errors"}
"""Imported when they are asked for: the processes of a server need none of them."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name], __name__), name)
