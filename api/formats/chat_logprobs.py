"""Log-probabilities in the format of chats and responses."""

from __future__ import annotations

from ...engine.messages import TokenLogprob, TokenLogprobs
from ...engine.text.tokenizer import Tokenizer
from ..schemas.answers import ChatLogprob, TopLogprob
from .logprobs import reported


def chat_logprob(tokenizer: Tokenizer, entry: TokenLogprobs) -> ChatLogprob:
    """One token of the answer, and the most likely tokens at its position."""
    chosen = _top(tokenizer, entry.chosen)
    top = [_top(tokenizer, candidate) for candidate in entry.top]
    return ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def _top(tokenizer: Tokenizer, candidate: TokenLogprob) -> TopLogprob:
    spelled = tokenizer.token_bytes(candidate.token_id)
    text = spelled.decode(errors="replace")
    return TopLogprob(text, reported(candidate.logprob), list(spelled))
