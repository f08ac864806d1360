"""The violations that a simulation reports, by name."""

from __future__ import annotations

from enum import StrEnum


class Invariant(StrEnum):
    """The names that a report uses."""

    BLOCKS_CONSERVED = "I1 free and held blocks are all blocks, counted as often as they are owned"
    ONE_WRITER = "I2 no block is written by two requests, nor while it is shared"
    PUBLISHED_LATE = "I3 no block is published before the step that writes it has finished"
    OWN_CONTENT = "I4 what is read is what the request's tenant, adapter and tokens give"
    LEASE_IS_ROW = "I5 a lease's row and generation hold the request's adapter"
    PROGRESS = "I6 what waits is run or refused, unless its adapter is on its way"
    CAPS = "I7 nobody exceeds a limit, or his cap while others wait"
    ONE_END = "I8 every request ends in one way, once"
    LEASES_LIVE = "I9 leases belong to requests that live, and are all that they need"
    QUIESCENT = "I10 when all requests have ended nothing is held"
    LEAVES_FIRST = "I12 what is cached can be found: what comes before it is cached too"
    SERVICE = "I11 tenants are charged for what they were served, once"
    PINS = "I13 pinned adapters stay on the device or come back, and kept ones stay"
    SHARES = "I14 a tenant beyond its share evicts nothing that others work with"
    AS_PLAIN = "I16 what is generated is what decoding without drafts gives"
    READ_ONCE = "I17 what is asked of a prompt is given once, in order, from its own positions"
    DELIVERED = "I18 every generated token is delivered once, by the iteration that reads it"
    SUSPECTS = "I19 a request that crashes the engine is among those suspected of it"
    BACKGROUND = "I20 a background request runs only while there are no others"
    PRIORITY = (
        "I21 a request gives way only to one of its tenant with a higher priority and less rank"
    )
    MEMORY = "I22 two sides of a border never take more than the memory, and keep their floors"
    HANDED_OVER = "I23 nothing that was computed with a deleted adapter is sent or kept"
    BILLED = (
        "I24 each token is billed once, and as cached if the prompt's computation found it cached"
    )
    CHARGED = "I25 requests are charged with what the engine has spent, each thing once"
    DRAINS = "I15 a deleted adapter's requests end by the deadline, and no new ones begin"


class Violation(BaseException):
    """An invariant does not hold. Code that lives on after exceptions does not after this."""

    def __init__(self, invariant: Invariant, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


def require(condition: object, invariant: Invariant, detail: str = "") -> None:
    if not condition:
        raise Violation(invariant, detail)
