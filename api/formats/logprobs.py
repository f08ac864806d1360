"""Log-probabilities as valid JSON numbers."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_LOGPROB = -9999.0
"""Represents minus infinity, as in OpenAI's responses."""


def reported(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def spelled(token: bytes) -> str:
    """A token where its text is its name, as in OpenAI's completions: bytes that are no text by
    themselves are written as `bytes:\\xe2\\x80`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def distinct_spellings(tokens: Mapping[int, bytes]) -> dict[int, str]:
    """A unique text for each token id: its text or, if an earlier one has the same text,
    `token_id:7`, as in vLLM."""
    names: dict[str, int] = {}
    for token_id, token in tokens.items():
        if names.setdefault(spelled(token), token_id) != token_id:
            names[f"token_id:{token_id}"] = token_id
    return {token_id: name for name, token_id in names.items()}
