"""The maximum bytes per token, to refuse oversized texts before tokenizing. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenizers import pre_tokenizers

_NFC_SHRINKS = 4
"""A text in any form has at most this many times the bytes of its NFC: U+0390, of two bytes, can be
written with seven."""
_BYTE_CHARACTERS = frozenset(pre_tokenizers.ByteLevel.alphabet())
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_WHOLE_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
_SPLITTING_PRE_TOKENIZERS = frozenset({"Split", "Punctuation"})
_UTF8_CHARACTER_BYTES = 4

Part = Mapping[str, Any]


def most_bytes_per_token(tokenizer: Part) -> int | None:
    """The bound for a tokenizer as `tokenizer.json` describes it.

    None if there is no bound, or if it is unknown: text can vanish, or a token can stand for text
    of any length.
    """
    shrinks = _shrinks(tokenizer["normalizer"])
    added = tokenizer["added_tokens"]
    if shrinks is None or not _keeps_all(tokenizer["pre_tokenizer"]):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # it takes any number of spaces with it
    longest = _longest(tokenizer["model"], _is_byte_level(tokenizer["pre_tokenizer"]))
    if longest is None:
        return None
    return shrinks * max([longest, *(len(token["content"].encode()) for token in added)])


def _shrinks(normalizer: Part | None) -> int | None:
    """The maximum ratio of the bytes of a text to those of its result; None if unknown."""
    match normalizer:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "NFC"}:
            return _NFC_SHRINKS
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return 1 if len(content.encode()) >= len(pattern.encode()) else None
        case {"type": "Sequence", "normalizers": parts}:
            each = [_shrinks(part) for part in parts]
            return None if None in each else math.prod(filter(None, each))
    return None


def _keeps_all(pre_tokenizer: Part | None) -> bool:
    """Whether every character is part of a word."""
    match pre_tokenizer:
        case None:
            return True
        case {"type": "Sequence", "pretokenizers": parts}:
            return all(map(_keeps_all, parts))
        case {"type": kind, "behavior": behavior} if kind in _SPLITTING_PRE_TOKENIZERS:
            return bool(behavior != "Removed")
        case {"type": kind}:
            return kind in _WHOLE_PRE_TOKENIZERS
    return False


def _is_byte_level(pre_tokenizer: Part | None) -> bool:
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": parts}:
            return any(map(_is_byte_level, parts))
        case {"type": "ByteLevel"}:
            return True
    return False


def _longest(model: Part, is_byte_level: bool) -> int | None:
    """The most bytes of one token, if every text is made of tokens of the model."""
    tokens = _tokens(model)
    if is_byte_level and tokens.issuperset(_BYTE_CHARACTERS):
        return max(map(_bytes_of_byte_level, tokens))
    longest = max((len(token.encode()) for token in tokens), default=0)
    if model.get("byte_fallback") and tokens.issuperset(_BYTE_TOKENS):
        return longest
    if model["type"] == "BPE" and model["unk_token"] is not None and not model["fuse_unk"]:
        return max(longest, _UTF8_CHARACTER_BYTES)
    return None


def _tokens(model: Part) -> set[str]:
    if model["type"] == "BPE":
        return set(model["vocab"])
    if model["type"] == "Unigram":
        return {token for token, _ in model["vocab"]}
    return set()


def _bytes_of_byte_level(token: str) -> int:
    """A token of a byte-level vocabulary has one character per byte."""
    return len(token) if _BYTE_CHARACTERS.issuperset(token) else len(token.encode())
