"""Loraplex: one quantized base model, thousands of tenants' LoRA adapters, every batch mixed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .platform.version import __version__ as __version__

if TYPE_CHECKING:
    from .api.client.client import Client as Client
    from .api.client.errors import ClientError as ClientError
    from .api.offline.errors import LLMError as LLMError
    from .api.offline.llm import LLM as LLM
    from .api.offline.outputs import CompletionOutput as CompletionOutput
    from .api.offline.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .api.offline.outputs import RequestOutput as RequestOutput
    from .api.offline.sampling_params import SamplingParams as SamplingParams

_LAZY = {
    "Client": "client.client",
    "ClientError": "client.errors",
    "CompletionOutput": "offline.outputs",
    "EmbeddingRequestOutput": "offline.outputs",
    "LLM": "offline.llm",
    "LLMError": "offline.errors",
    "RequestOutput": "offline.outputs",
    "SamplingParams": "offline.sampling_params",
}
"""Modules of `api/`, imported when they are first used: the command line needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f".api.{_LAZY[name]}", __name__)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        message = f"{name} needs the package torch: pip install 'loraplex[engine]'"
        raise ImportError(message) from exc
    return getattr(module, name)
