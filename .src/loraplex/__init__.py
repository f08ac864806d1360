"""Loraplex: one quantized base model, thousands of tenants' LoRA adapters, every batch mixed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .platform.version import __version__ as __version__

if TYPE_CHECKING:
    from .api.offline.errors import LLMError as LLMError
    from .api.offline.llm import LLM as LLM
    from .api.offline.outputs import CompletionOutput as CompletionOutput
    from .api.offline.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .api.offline.outputs import RequestOutput as RequestOutput
    from .api.offline.sampling_params import SamplingParams as SamplingParams

_OFFLINE = {
    "CompletionOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "LLM": "llm",
    "LLMError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the offline classes when they are first used: the command line needs no torch."""
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f".api.offline.{_OFFLINE[name]}", __name__)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        message = f"{name} needs the package torch: pip install 'loraplex[engine]'"
        raise ImportError(message) from exc
    return getattr(module, name)
