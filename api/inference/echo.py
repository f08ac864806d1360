"""The prompt as part of the answer (`echo`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...engine.text.detokenizer import Detokenizer
from ...engine.text.tokenizer import Tokenizer


class Echo(NamedTuple):
    """A prompt's text, and where its tokens are in it."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]
    """The offset of each token; a token that is not in the text, such as a special token that the
    tokenizer adds, is placed before its successor."""


def echo_of(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> Echo:
    """`text`: the text that the caller sent, if the model reads all of it; None: the tokens' own
    text."""
    detokenizer = Detokenizer(tokenizer)
    pieces: list[str] = []
    offsets: list[int] = []
    length = 0
    for token_id in token_ids:
        offsets.append(length)
        pieces.append(detokenizer.push([token_id]).text)
        length += len(pieces[-1])
        if text is not None and token_id in tokenizer.special_token_ids:
            name = tokenizer.token_text(token_id)
            length += len(name) if text.startswith(name, length) else 0
    if text is None:
        text = "".join([*pieces, detokenizer.finish().text])
    return Echo(text, token_ids, [min(offset, len(text)) for offset in offsets])
