"""Amounts of money: integers of 1e-9 of the currency's unit, written as decimal strings."""

from __future__ import annotations

from ..errors import InvalidValue

NANOS = 10**9
"""Of one unit."""
_DECIMALS = 9
_MIN_DECIMALS = 2
MAX_AMOUNT = 10**9 * NANOS
"""The most that one request or one budget is counted with: sums fit a column of 64 bits."""


def parse_money(text: str, *, param: str, most: int = MAX_AMOUNT) -> int:
    """The amount of a decimal string such as `0.15`. Raises InvalidValue."""
    units, point, decimals = text.partition(".")
    parts = (units, decimals) if point else (units,)
    is_decimal = all(part.isascii() and part.isdigit() for part in parts)
    if not is_decimal or len(decimals) > _DECIMALS or len(units) > len(str(most)):
        raise _not_money(param, most)
    amount = int(units) * NANOS + int(decimals.ljust(_DECIMALS, "0"))
    if amount > most:
        raise _not_money(param, most)
    return amount


def format_money(amount: int) -> str:
    """The amount as a decimal string with at least two decimals."""
    units, nanos = divmod(amount, NANOS)
    decimals = f"{nanos:0{_DECIMALS}}".rstrip("0").ljust(_MIN_DECIMALS, "0")
    return f"{units}.{decimals}"


def _not_money(param: str, most: int) -> InvalidValue:
    return InvalidValue(
        f"{param} must be a decimal string from 0 to {most // NANOS} with at most {_DECIMALS} "
        'decimals, such as "0.15".',
        param=param,
    )
