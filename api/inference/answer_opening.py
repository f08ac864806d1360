"""The beginning of an answer, which shows whether it is a refusal.

It is kept while the answer is generated, and never stored.
"""

from __future__ import annotations

MAX_CHARACTERS = 240
"""A refusal says so in its first sentences."""
PHRASES = (
    *("i'm sorry, but i", "i am sorry, but i", "i apologize, but i"),
    *("i can't help", "i cannot help", "i can't assist", "i cannot assist"),
    *("i can't provide", "i cannot provide", "i can't fulfill", "i cannot fulfill"),
    *("i can't comply", "i cannot comply", "i can't answer", "i cannot answer"),
    *("i'm unable to", "i am unable to", "i'm not able to", "i am not able to"),
    *("i must decline", "i won't be able to", "as an ai"),
)
"""In lower case, with straight apostrophes and single spaces."""


class AnswerOpening:
    """The first characters of one choice, without its reasoning."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        if len(self._text) < MAX_CHARACTERS:
            self._text += text[:MAX_CHARACTERS]

    def is_refusal(self, finish_reason: str) -> bool:
        """It contains a phrase of refusals, or the model ended its answer without any text."""
        words = self._text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").split()
        if not words:
            return finish_reason == "stop"
        opening = " ".join(words)
        return any(phrase in opening for phrase in PHRASES)
