"""A base of which only the configuration is there, as a folder with headers of its weights.

The weights are a hole in the file: it takes no room on the disk, and everything that reads headers
reads them as those of a published base.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from ..checkpoint.base_config import CONFIG_FILE, quantization_settings, read_config_file
from ..checkpoint.files import download_config, local_folder
from ..checkpoint.stored_tensors import INDEX_FILE, WEIGHTS_FILE
from ..checkpoint.weights import build_model, load_config
from ..errors import BaseNotFound, UnsupportedModel
from ..gguf.header import GGUF_FILE

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


@contextmanager
def planned_base(model: str) -> Iterator[str]:
    """A model whose weights' headers can be read: `model` itself, or a folder made of its
    configuration that is there until the end.

    `model`: a folder with or without weights, a `config.json`, a `.gguf` file or a hub id, of which
    nothing but the configuration is downloaded. Raises UnsupportedModel.
    """
    path = Path(model).expanduser()
    if path.name == CONFIG_FILE and path.is_file():
        path = path.parent
    folder = local_folder(str(path) if path.exists() else model) or download_config(model)
    if _has_weights(folder):
        yield str(folder)
        return
    if not (folder / CONFIG_FILE).is_file():
        raise BaseNotFound(f"{folder} has no {CONFIG_FILE}")
    config = read_config_file(folder)
    if quantization_settings(config, folder):
        raise UnsupportedModel(
            f"{folder} has no weights, and its {CONFIG_FILE} says that they are quantized: their "
            "sizes are known from the files only. Give the folder with its weights, or the "
            "unquantized model with --quantize"
        )
    with unwritten_base(config) as made:
        yield made


@contextmanager
def unwritten_base(config: Mapping[str, Any]) -> Iterator[str]:
    """A folder with this `config.json` and the headers of its weights, until the end."""
    with tempfile.TemporaryDirectory(prefix="loraplex-plan-") as name:
        folder = Path(name)
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        _write_headers(folder)
        yield name


def _has_weights(folder: Path) -> bool:
    files = (WEIGHTS_FILE, INDEX_FILE, GGUF_FILE)
    return any((folder / file).exists() for file in files)


def _write_headers(folder: Path) -> None:
    """Write a safetensors file of all weights, whose values are a hole."""
    config = load_config(folder)
    dtype = config.dtype or torch.float32
    with torch.device("meta"):
        model = build_model(config).to(dtype)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: each for name, each in model.state_dict().items() if name not in parameters}
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for tensor_name, tensor in revert_weight_conversion(model, tensors).items():
        start, end = end, end + tensor.nbytes
        header[tensor_name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        file.truncate(8 + len(packed) + end)
