"""Loads the model of `draft:MODEL` or `draft_tree:MODEL`, before the memory plan, which includes
it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ..checkpoint.files import DRAFT, locate_base, naming_the_draft
from ..checkpoint.weights import load_config
from ..config import EngineConfig, KvDtype, source_of
from ..errors import InvalidParameter, TokenizerUnusable, UnsupportedModel
from ..model.base_model import BaseModel
from ..model.whole_base import load_base_model


def load_draft_model(config: EngineConfig, base: BaseModel) -> BaseModel | None:
    """The draft model, loaded and admitted like the base; None if the configuration has none.

    It is served like the base (device, dtype, quantization, cache format), up to its own maximum
    length. Its blocks are written again after they were complete, so a format that quantizes
    complete blocks is not used for them. Raises InvalidParameter for a configuration without a
    model name or with several, UnsupportedModel if the model cannot be loaded or has another
    vocabulary than the base.
    """
    model = draft_name(config)
    if model is None:
        return None
    with naming_the_draft(model):
        draft = draft_config(config, locate_base(model))
        check_tokens(Path(draft.model), locate_base(config.model), base.vocab_size)
        return load_base_model(draft)


def draft_name(config: EngineConfig) -> str | None:
    """The model of `draft:MODEL`; None without one. Raises InvalidParameter if it is not one."""
    entries = [entry.partition(":") for entry in config.speculation]
    given = [(name, model) for name, _, model in entries if source_of(name) == DRAFT]
    if not given:
        return None
    name, model = given[0]
    if len(given) > 1:
        raise InvalidParameter("speculation", f"{name} is given twice")
    if not model:
        raise InvalidParameter("speculation", f"{name} requires a model: {name}:MODEL")
    return model


def draft_config(config: EngineConfig, folder: Path) -> EngineConfig:
    """How the draft model in this folder is loaded beside the base of `config`."""
    return replace(
        config,
        model=str(folder),
        quantization_exclude=(),  # these are the base's layers
        max_model_len=None,
        kv_dtype=KvDtype.AUTO if config.kv_dtype.quantizes_blocks else config.kv_dtype,
    )


def check_tokens(draft_dir: Path, base_dir: Path, vocab_size: int) -> None:
    """Raises UnsupportedModel unless a token id means the same to both models."""
    draft_size = load_config(draft_dir).vocab_size
    if draft_size != vocab_size:
        raise UnsupportedModel(f"its vocabulary has {draft_size} tokens, the base's {vocab_size}")
    draft_tokens, base_tokens = _tokens(draft_dir), _tokens(base_dir)
    if draft_tokens is None or base_tokens is None or draft_tokens == base_tokens:
        return
    token = min(token for token, _ in draft_tokens.items() ^ base_tokens.items())
    raise UnsupportedModel(f"its tokenizer is not the base's: they differ in the token {token!r}")


def _tokens(folder: Path) -> dict[str, int] | None:
    """The ids of all tokens, added ones included; None without a `tokenizer.json`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        contents = json.loads(path.read_bytes())
        vocab = contents["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: pieces with their scores, in the order of their ids
            vocab = {piece: index for index, (piece, _) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in contents.get("added_tokens") or ()}
        return {**vocab, **added}
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise TokenizerUnusable(f"{path} cannot be read as a tokenizer") from exc
