"""The small files of a base's folder, made from a GGUF file: configuration and tokenizer.

The rest of the program then sees the folder of any other base, whose weights are in the GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerFast, __version__

from ...adapters.durable import sync_directory, sync_tree
from ..errors import TokenizerUnusable, UnsupportedModel
from .config import config_of, read_config
from .header import GGUF_FILE, NO_PACKAGE, GgufHeader, read_header

_GPT2_SPLITS = frozenset({"gpt-2", "default", "phi-2", "olmo", "jina-es", "jina-de", "mpt"})
"""Values of `tokenizer.ggml.pre` for GPT-2's way to split a text into words."""
_BOS_SPLITS = frozenset({"llama3", "llama-v3", "llama-bpe"})
"""Tokenizers that begin a text with their first token if the file does not say whether."""
_END_IDS = ("eos", "eot", "eom")
_TURN_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
        *("<|endoftext|>", "<|end_of_text|>"),
    }
)
"""Special tokens that end an answer wherever they exist: files often name only one of theirs."""
_MAX_REASON_CHARACTERS = 300


def unpack_config(path: Path, folder: Path) -> None:
    """Write `config.json`, `generation_config.json` and the tokenizer's files into this folder.

    It is created if necessary. Raises as `read_config` and `write_tokenizer` do.
    """
    header = read_header(path)
    config = config_of(header)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _write_tokenizer(header, folder)
    ends = _end_tokens(header, tokenizer, vocab_size=config["vocab_size"])
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": ends or None}
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", config)  # last: with it, the folder is complete


def served_folder(path: Path) -> Path:
    """The folder of a base in a GGUF file, in the user's cache, with a link to the file.

    It is made anew for each version of the file. Raises as `unpack_config` does, and
    UnsupportedModel without the package `gguf`.
    """
    read_config(path)  # the file may be damaged since the folder was made
    if find_spec("gguf") is None:
        raise UnsupportedModel(NO_PACKAGE)
    path = path.resolve()
    state = path.stat()
    version = f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0{__version__}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "loraplex", "gguf")
    folder = root / hashlib.sha256(version.encode()).hexdigest()[:32]
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root) as made:
            unpacked = Path(made, "folder")
            unpack_config(path, unpacked)
            (unpacked / GGUF_FILE).symlink_to(path)
            sync_tree(unpacked)  # the folder is not looked at again once it has its name
            try:
                unpacked.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
            sync_directory(root)
    return folder


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template into this folder.

    Raises as `read_header` does, TokenizerUnusable for a tokenizer that is not supported, and
    UnsupportedModel if transformers is too old.
    """
    _write_tokenizer(read_header(path), folder)


def _write_tokenizer(header: GgufHeader, folder: Path) -> PreTrainedTokenizerFast:
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS as KNOWN_SPLITS,
        )
    except ImportError as exc:
        raise UnsupportedModel(
            "this version of transformers cannot read the tokenizers of GGUF files: "
            "pip install 'transformers>=5.24'"
        ) from exc
    _check_split(header, _GPT2_SPLITS | KNOWN_SPLITS.keys())
    try:
        architecture, content, settings = get_gguf_tokenizer(str(header.path))
        backend, more = convert_gguf_tokenizer(architecture, content)
        if content.get("pre_tokenizer_type") in _BOS_SPLITS:
            settings.setdefault("add_bos_token", True)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)
        tokenizer.save_pretrained(folder)
    except Exception as exc:  # tokenizers raises bare Exception for a vocabulary it cannot use
        reason = " ".join(str(exc).split())[:_MAX_REASON_CHARACTERS]
        raise TokenizerUnusable(
            f"{header.path}: its tokenizer cannot be read: {type(exc).__name__}: {reason}"
        ) from exc
    return tokenizer


def _check_split(header: GgufHeader, known: frozenset[str]) -> None:
    """transformers would split the texts for any other tokenizer as GPT-2 does."""
    split = header.metadata.get("tokenizer.ggml.pre", "default")
    if header.metadata.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        raise TokenizerUnusable(
            f"{header.path}: its tokenizer splits texts as {split!r}, which is not supported: give "
            "the original checkpoint"
        )


def _end_tokens(
    header: GgufHeader, tokenizer: PreTrainedTokenizerFast, *, vocab_size: int
) -> list[int]:
    """The tokens that end an answer, sorted."""
    named = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _END_IDS]
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    known = [index for index, token in added.items() if token.content in _TURN_ENDS]
    return sorted({i for i in (*named, *known) if type(i) is int and 0 <= i < vocab_size})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
