"""A small base that reasons before it answers."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from support.chat_templates import THINKING_TEMPLATE
from support.models import make_tiny_llama

CLOSING = 261
"""The token that ends the reasoning."""


def make_thinking_base(base: Path) -> None:
    """Write a base that has the markers of reasoning as tokens: 260 and 261."""
    make_tiny_llama(base, vocab_size=262)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(base / "tokenizer.json"))
    (base / "chat_template.jinja").write_text(THINKING_TEMPLATE)
