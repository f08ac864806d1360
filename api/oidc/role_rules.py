"""The operator's rules: which groups of the identity provider have which role."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from ...platform.errors import InvalidValue
from ...platform.keys.principal import OperatorRole, TenantRole
from ...platform.names import is_slug

PARAM = "oidc_roles"
OPERATORS = "@operators"
"""Stands for the platform in a rule. No tenant can have this name."""


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Members of the group have the role in the tenant, or on the platform."""

    group: str
    tenant: str | None
    """Its slug; None: the role is an operator's."""
    role: TenantRole | OperatorRole


def parse_rules(text: str) -> tuple[RoleRule, ...]:
    """The rules of a JSON object such as `{"ml-team": "acme:developer"}`, in its order.

    Raises InvalidValue.
    """
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        pairs = None
    if not isinstance(pairs, tuple):  # which JSON has not, so it is an object
        message = 'Not a JSON object such as {"ml-team": "acme:developer"}.'
        raise InvalidValue(message, param=PARAM)
    return tuple(_parse_rule(group, access) for group, access in pairs)


def first_rule(rules: Collection[RoleRule], groups: Collection[str]) -> RoleRule | None:
    """The first rule for one of these groups; None: they have no access."""
    return next((rule for rule in rules if rule.group in groups), None)


def _parse_rule(group: str, access: object) -> RoleRule:
    place, _, role = access.partition(":") if isinstance(access, str) else ("", "", "")
    try:
        if place == OPERATORS:
            return RoleRule(group, None, OperatorRole(role))
        if is_slug(place):
            return RoleRule(group, place, TenantRole(role))
    except ValueError:
        pass
    raise InvalidValue(
        f"The role of {group!r} must be TENANT:ROLE with one of {', '.join(TenantRole)}, or "
        f"{OPERATORS}:ROLE with one of {', '.join(OperatorRole)}.",
        param=PARAM,
    )
