"""How a sequence's tokens are converted to text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextForm:
    """What is part of an output's text, and where the text ends."""

    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    includes_stop: bool = False
    """The text ends with the stop string or the stop token that ended it, not before it."""
    num_unstopped_tokens: int = 0
    """No stop string begins in the text of this many first tokens."""
    continues_prompt: bool = False
    """Plain completions: the text continues the prompt's."""
    shows_special_tokens: bool = False
    """All special tokens are part of the text."""
    visible_token_ids: Collection[int] = ()
    """Special tokens that are part of the text in any case: the markers of calls."""
