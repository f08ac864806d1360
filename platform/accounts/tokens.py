"""Random tokens of sessions and invitations.

Each has 256 random bits, so storing a plain hash is sufficient. Prefixes let scanners find leaked
tokens.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from ..secrets import derive_key

SESSION_PREFIX = "lpx_session_"
INVITATION_PREFIX = "lpx_join_"
MAX_TOKEN_LENGTH = 128
_RANDOM = r"[0-9A-Za-z_-]{43}"
_TOKEN = re.compile(rf"(?:{SESSION_PREFIX}|{INVITATION_PREFIX}){_RANDOM}")
_CSRF = "console-csrf"
_RANDOM_BYTES = 32


@dataclass(frozen=True, slots=True)
class AccountToken:
    """A well-formed token. The text is a secret and does not appear in the repr."""

    text: str = field(repr=False)

    @property
    def hash(self) -> str:
        """The stored hash."""
        return derive_key(self.text.encode(), "account-token").hex()

    @property
    def csrf_token(self) -> str:
        """A value that only the console's pages can derive for a session, because no script reads
        the cookie."""
        return derive_key(self.text.encode(), _CSRF).hex()


def make_token(prefix: str) -> AccountToken:
    """A new random token."""
    return AccountToken(prefix + secrets.token_urlsafe(_RANDOM_BYTES))


def parse_token(text: str, prefix: str) -> AccountToken | None:
    """The token of this kind, or None if the text has not its form."""
    is_token = text.startswith(prefix) and _TOKEN.fullmatch(text)
    return AccountToken(text) if is_token else None
