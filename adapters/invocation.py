"""The invocation of an activated LoRA: the tokens from which on the adapter acts.

Source: Greenewald et al., "Activated LoRA", https://huggingface.co/papers/2504.12397, and PEFT's
`alora_invocation_tokens`. The last occurrence in the prompt counts, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import AdapterRejected

FIELD = "alora_invocation_tokens"
"""Of PEFT's configuration."""
MAX_INVOCATION_TOKENS = 256
_MAX_TOKEN_ID = (1 << 31) - 1

InvocationTokens = tuple[int, ...]
"""Empty: the adapter has no invocation, and acts on all tokens."""


def adapter_start(prompt: Sequence[int], invocation: InvocationTokens) -> int | None:
    """The position of the prompt's first token that the adapter acts on; None: it acts on none,
    because the prompt does not contain the invocation."""
    length = len(invocation)
    if not length:
        return 0
    for start in range(len(prompt) - length, -1, -1):
        if prompt[start] == invocation[0] and tuple(prompt[start : start + length]) == invocation:
            return start
    return None


def parse_invocation(value: object) -> InvocationTokens:
    """The invocation of the configuration's field. Raises AdapterRejected."""
    if value is None:
        return ()
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= MAX_INVOCATION_TOKENS
        or not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in value)
    ):
        raise _invalid(f"is not a list of 1 to {MAX_INVOCATION_TOKENS} token IDs")
    return tuple(value)


def check_vocabulary(invocation: InvocationTokens, num_tokens: int | None) -> None:
    """Raise AdapterRejected if the base, which has so many tokens, does not have one of the
    invocation's. None: the number is not known."""
    largest = max(invocation, default=0)
    if num_tokens is not None and largest >= num_tokens:
        raise _invalid(f"has the token ID {largest}; the base has {num_tokens} tokens")


def invocation_of(report: Mapping[str, Any]) -> InvocationTokens:
    """That of a stored intake report."""
    return tuple(report.get("invocation_token_ids", ()))


def _invalid(fault: str) -> AdapterRejected:
    return AdapterRejected("invalid_invocation", f"{FIELD} {fault}", pointer=f"/{FIELD}")
