"""How a base is to be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.quantize import WeightFormat
from ..checkpoint.files import locate_base
from ..checkpoint.next_token_layer import NextTokenLayer
from ..checkpoint.packed_format import find_packed_format
from ..checkpoint.weights import load_config
from ..config import EngineConfig
from ..kv.cache import KvFormat, choose_kv_format
from .admission import SelfTest, check_config, kv_self_test
from .base_model import (
    check_quantized_once,
    choose_device,
    choose_dtype,
    choose_quantization,
    weight_format,
)
from .load_quantization import LoadQuantization
from .rope import RotaryContexts, rotary_contexts


class LoadSettings(NamedTuple):
    """From the engine's configuration and the base's."""

    engine: EngineConfig
    model_dir: Path
    config: Any
    layer: NextTokenLayer | None
    """Whose model is loaded; None: the folder's own."""
    max_model_len: int
    contexts: RotaryContexts
    device: torch.device
    dtype: torch.dtype
    kv_format: KvFormat
    kv_test: SelfTest
    stored_format: str | None
    """In which the files hold it quantized; None: they do not."""
    quantization: LoadQuantization
    ends_format: WeightFormat | None
    rounded: WeightFormat | None
    """In which layers are held once more, for drafts."""

    @classmethod
    def of(
        cls,
        engine: EngineConfig,
        *,
        rounded: WeightFormat | None,
        layer: NextTokenLayer | None = None,
    ) -> LoadSettings:
        """Raises UnsupportedModel and InvalidParameter."""
        model_dir = locate_base(engine.model)
        config = load_config(model_dir)
        if layer is not None:
            config = layer.config(config)
        max_model_len = check_config(config, max_model_len=engine.max_model_len)
        contexts = rotary_contexts(config, max_model_len=max_model_len)
        device = choose_device(engine.device)
        dtype = choose_dtype(engine.dtype, checkpoint=config.dtype, device=device)
        kv_format = choose_kv_format(engine.kv_dtype, dtype=dtype, device=device)
        stored_format = find_packed_format(model_dir)
        check_quantized_once(engine, stored_format)
        return cls(
            engine=engine,
            model_dir=model_dir,
            config=config,
            layer=layer,
            max_model_len=max_model_len,
            contexts=contexts,
            device=device,
            dtype=dtype,
            kv_format=kv_format,
            kv_test=kv_self_test(kv_format, engine.kv_block_size, max_model_len=max_model_len),
            stored_format=stored_format,
            quantization=choose_quantization(engine, config),
            ends_format=weight_format(engine.embedding_quantization),
            rounded=rounded,
        )
