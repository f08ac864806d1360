"""The bodies of vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from ..contract.request_model import RequestModel, unsupported
from .generation import ModelName


class LoadAdapterBody(RequestModel):
    lora_name: ModelName
    """A pushed adapter, as in `model`."""
    lora_path: str | None = None
    """Refused if it is something else than `lora_name`: the server reads no path and no URL."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"lora_name": "support-bot"},)
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"load_inplace": (False,)}

    @model_validator(mode="after")
    def refuse_paths(self) -> Self:
        if self.lora_path not in (None, "", self.lora_name):
            raise unsupported("lora_path")
        return self


class UnloadAdapterBody(RequestModel):
    lora_name: ModelName

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"lora_name": "support-bot"},)
    tolerated: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})
