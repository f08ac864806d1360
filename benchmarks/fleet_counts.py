"""What clients of a fleet were told, and the sums that `make fleet-demo` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import NamedTuple

from loraplex.api.demo.task import Request, Style

AGENT_KILLED = "agent killed"


@dataclass(frozen=True, slots=True)
class Told:
    """One request as its client saw it; the client's own retries are not requests of their own."""

    tenant: str
    model: str
    adapter: str | None
    """The pinned name of the adapter that answered; None for the base."""
    style: Style
    """In which the model answers."""
    request: Request
    replica: str | None
    """Where it ran; None if it ran nowhere."""
    tier: str | None
    text: str
    num_prompt_tokens: int | None
    """As the server said at the end; None if the answer did not get there."""
    num_tokens: int
    """Generated tokens that were received."""
    num_said_tokens: int | None
    """Generated tokens, as the server said at the end."""
    code: str | None
    """Of the error that ended it."""
    num_retries: int

    @property
    def is_whole(self) -> bool:
        return self.code is None and self.num_said_tokens == self.num_tokens


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to the fleet, and what clients were told until it was over."""

    event: str
    seconds: float
    """Until it was over: what was killed served again, or the wanted number of replicas did."""
    settle_seconds: float
    """From then until every adapter and pin was on the first replica of its order."""
    answers: int
    ended_with_code: int


class Moved(NamedTuple):
    """The adapters whose orders begin with a replica that joined."""

    replica: str
    adapters: Set[str]
    """Their pinned names."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The result of the demo."""

    replicas: int
    requests: int
    retried: int
    ended_with_code: int
    truncated: int
    """Answers that ended like whole ones and were not."""
    foreign: int
    """Answers in the style of another model."""
    ledger_tokens: int
    client_tokens: int
    resident_hits: float
    """The share of the requests for adapters that found theirs on the replica's device."""
    random_hits: float
    """The share that would have, had each gone to a random replica at the same moment."""
    moved_requests: int
    """For adapters that moved to a replica that joined, answered there."""
    moved_cold: int
    """Those of them that did not find their adapter on its device."""
    events: Sequence[Event]

    @property
    def is_good(self) -> bool:
        is_exact = self.ledger_tokens == self.client_tokens
        is_whole = self.truncated == self.foreign == self.moved_cold == 0
        return is_exact and is_whole and not any(map(_has_failed, self.events))

    def as_json(self) -> Mapping[str, object]:
        return asdict(self)


def count(
    told: Sequence[Told],
    *,
    replicas: Collection[str],
    ledger_tokens: int,
    events: Sequence[Event] = (),
    moved: Moved | None = None,
) -> Counts:
    """The sums of requests in the order in which they began."""
    adapters = [each for each in told if each.adapter is not None and each.replica is not None]
    num_hits = sum(each.tier == "device" for each in adapters)
    num_random = _expected_random_hits(adapters, len(replicas))
    num_adapters = max(1, len(adapters))
    at_home = [each for each in adapters if moved is not None and _has_moved(each, moved)]
    return Counts(
        replicas=len(replicas),
        requests=len(told),
        retried=sum(each.num_retries for each in told),
        ended_with_code=sum(each.code is not None for each in told),
        truncated=sum(each.code is None and not each.is_whole for each in told),
        foreign=sum(map(is_foreign, told)),
        ledger_tokens=ledger_tokens,
        client_tokens=client_tokens(told),
        resident_hits=round(num_hits / num_adapters, 3),
        random_hits=round(num_random / num_adapters, 3),
        moved_requests=len(at_home),
        moved_cold=sum(each.tier != "device" for each in at_home),
        events=events,
    )


def _has_moved(told: Told, moved: Moved) -> bool:
    return told.replica == moved.replica and told.adapter in moved.adapters


def _has_failed(event: Event) -> bool:
    """Only the end of an agent may end requests."""
    return event.event != AGENT_KILLED and event.ended_with_code > 0


def client_tokens(told: Iterable[Told]) -> int:
    """Prompt and generated tokens. The prompt of an answer that broke off has as many as the same
    prompt of a whole one."""
    told = list(told)
    prompts = {
        (each.model, each.request.prompt): each.num_prompt_tokens
        for each in told
        if each.num_prompt_tokens is not None
    }
    started = (each for each in told if each.replica is not None)
    return sum(
        (prompts[each.model, each.request.prompt] or 0) + each.num_tokens for each in started
    )


def is_foreign(told: Told) -> bool:
    """Whether the text is another model's right answer."""
    others = {told.request.answer(style) for style in Style if style is not told.style}
    return told.text in others


def places(told: Iterable[Told]) -> Mapping[str, Counter[str]]:
    """By tenant and model: how many requests each replica ran."""
    found: dict[str, Counter[str]] = {}
    for each in told:
        where = found.setdefault(f"{each.tenant}/{each.model}", Counter())
        where[each.replica or "nowhere"] += 1
    return found


def _expected_random_hits(told: Iterable[Told], num_replicas: int) -> float:
    """An adapter counts as resident wherever it has run before, also at a replica that was killed
    or removed since, which favours chance."""
    residents: dict[str, set[str]] = {}
    expected = 0.0
    for each in told:
        assert each.adapter is not None
        assert each.replica is not None
        known = residents.setdefault(each.adapter, set())
        expected += min(1.0, len(known) / num_replicas)
        known.add(each.replica)
    return expected
