"""JSON Schemas and patterns that an answer has to follow.

Patterns, those in schemas too, are matched in linear time: lookaround and backreferences are
refused. References to other documents are refused, and never fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ..client.errors import InvalidArgument

if TYPE_CHECKING:
    from jsonschema_rs import Validator

Constraint = Callable[[str], bool]
"""Whether an answer follows the schema or pattern."""
PATTERN_BYTES = 1 << 20
"""Maximum size of a compiled pattern, and of the cache with which it is matched."""


class InvalidConstraint(ValueError):
    """A schema or pattern that cannot be checked."""


def matches_pattern(pattern: str) -> Constraint:
    """Whether the pattern occurs in the answer. Raises InvalidConstraint."""
    return _validator({"type": "string", "pattern": pattern}, f"pattern {pattern!r}").is_valid


def matches_schema(schema: Any) -> Constraint:
    """Whether the answer is JSON that follows the schema. Raises InvalidConstraint."""
    validator = _validator(schema, "schema")

    def is_followed(answer: str) -> bool:
        try:
            return validator.is_valid(msgspec.json.decode(answer))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False

    return is_followed


def _validator(schema: Any, name: str) -> Validator:
    try:
        import jsonschema_rs  # here: other scorers do without the extra
    except ModuleNotFoundError:
        message = "Schemas and patterns need jsonschema-rs: pip install 'loraplex[eval]'"
        raise InvalidArgument(message) from None
    options = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES, dfa_size_limit=PATTERN_BYTES)
    try:
        return jsonschema_rs.validator_for(schema, pattern_options=options, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError) as exc:
        raise InvalidConstraint(f"invalid {name}: {str(exc).splitlines()[0]}") from exc
