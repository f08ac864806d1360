"""Changes a server's wall clock under load and checks the consequences.

    make soak     or: PYTHONPATH=.src:tests python -m benchmarks.clock_jumps [--jumps 16]

libfaketime (Debian's `faketime`) steps the wall clock of the API's process by minutes, an hour and
a day, forward and back. The monotonic clock is unaffected, as when a machine's clock is set. The
processes that the server starts keep the true time, because none of them exchanges a time of day
with another. The real engine serves a tiny model and an adapter, while other clients push adapters.
Prints one JSON object; exits with 1 unless

- no request hangs (30 s without a byte) or fails without a published code,
- the ledger equals the journal's counts and the usage reported to callers, to the token, also by
  day,
- a tenant with a limit of R requests per minute that sends requests all the time gets at most
  R + R·T/60 + 1 of them in any T seconds of true time: a full bucket, the inflow, and one. Once the
  bucket is empty it never waits longer than 20 s for the next, where 60 / R is expected and an hour
  would be the jump. Limits use a clock that is never set (decision 17), so a jump must neither fill
  the bucket nor block it,
- between any two jumps a push becomes ready and a deletion ends: their leases survive the jump,
- an expiring key is valid exactly while the server's clock is before its expiry. So setting the
  clock back before the expiry makes the key valid again, which is inherent in a wall-clock expiry;
  after its expiry no cached copy lets it pass,
- an answer under an `Idempotency-Key` is returned again while the server's clock is less than 24 h
  after the first, or before it; later the request may be executed again,
- the server runs through all of it, and exits with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.exact_usage import figures_of, least_tokens_of, ready_adapters

from loraplex.api.contract.error_codes import ERROR_CODES
from loraplex.platform.keys.principal import Scope
from support.beside_load import Pushes, pushing
from support.exact_usage import Callers, check_exact
from support.limits import limit
from support.models import make_adapter, make_tiny_llama
from support.mortal_server import MortalServer, is_alive, mortal_server
from support.server import PRODUCT_ENGINE, Caller
from support.tools import need_program
from support.waiting import wait_for

LIBRARY = "*/faketime/libfaketimeMT.so.1"
MINUTE, HOUR, DAY = 60, 3600, 86400
JUMPS = (HOUR, DAY, -HOUR, -10 * MINUTE, -DAY, 10 * MINUTE, -HOUR, 30 * HOUR, HOUR, -30 * HOUR)
"""Seconds, one after another and again; their sum is the clock's error at that time."""
REQUESTS_PER_MINUTE = 12
"""Few, so that a caller on a busy machine asks for more than that."""
MAX_GAP_SECONDS = 20.0
POLL_SECONDS = 0.1
ANSWERS_BETWEEN = 10
BETWEEN_SECONDS = 120.0
"""In which callers, a push and a deletion must have come to their end after a jump."""
KEPT_FOR = timedelta(hours=24)
CLOSE = timedelta(seconds=10)
"""A comparison with an end that is so close is left out."""


@dataclass
class WallClock:
    """The server's: true time and an error that is set."""

    path: Path
    offset: timedelta = timedelta()

    def set(self, offset: timedelta) -> None:
        """From here on; whoever asks meanwhile sees the old error or the new one."""
        written = self.path.with_suffix(".new")
        written.write_text(f"{offset.total_seconds():+.0f}\n")
        written.rename(self.path)
        self.offset = offset

    def now(self) -> datetime:
        return datetime.now(UTC) + self.offset

    def environment(self, library: Path) -> dict[str, str]:
        """Of the server that goes by it."""
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self.path),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


@dataclass
class Passes:
    """When a limited tenant's requests passed, in seconds of a clock that nobody sets."""

    times: list[tuple[float, float]] = field(default_factory=list)
    """When each was sent and answered: in between it passed."""
    codes: Counter[str] = field(default_factory=Counter)
    max_told_seconds: float = 0.0
    """The longest that a refusal said to wait."""

    @property
    def longest_gap_seconds(self) -> float:
        return max(after - before for (_, before), (_, after) in pairwise(self.times))

    def check(self) -> None:
        """Fails unless the limit held, and neither let everything pass nor locked the tenant out.

        See the module for the bounds.
        """
        assert self.codes["rate_limited"], "the limit was never reached"
        flow = REQUESTS_PER_MINUTE / 60
        for first, (begin, _) in enumerate(self.times):
            for number, (_, end) in enumerate(self.times[first:], 1):
                most = REQUESTS_PER_MINUTE + flow * (end - begin) + 1
                assert number <= most, f"{number} passed where {most:.0f} may"
        gap = self.longest_gap_seconds
        assert gap <= MAX_GAP_SECONDS, f"nothing passed for {gap:.1f} s"
        assert self.max_told_seconds <= 60, f"told to wait for {self.max_told_seconds} s"


@contextmanager
def asking_all_the_time(caller: Caller, model: str) -> Iterator[Passes]:
    """A thread that asks for a token again and again, until the block is left."""
    passes, is_over = Passes(), threading.Event()
    body = {"model": model, "prompt": "a", "max_tokens": 1}

    def ask_on() -> None:
        with httpx.Client(base_url=caller.url, timeout=30.0) as client:
            client.headers["authorization"] = f"Bearer {caller.key}"
            while not is_over.wait(POLL_SECONDS):
                sent_at = time.monotonic()
                try:
                    answer = client.post("/v1/completions", json=body)
                except httpx.TransportError as exc:
                    passes.codes[type(exc).__name__] += 1
                    continue
                if answer.is_success:
                    passes.times.append((sent_at, time.monotonic()))
                    continue
                passes.codes[answer.json()["error"]["code"]] += 1
                told = float(answer.headers.get("retry-after-ms", 0)) / 1000
                passes.max_told_seconds = max(passes.max_told_seconds, told)

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield passes
    finally:
        is_over.set()
        thread.join()


@dataclass
class Keys:
    """Keys that end, each made under an `Idempotency-Key`, and what they were good for."""

    caller: Caller
    clock: WallClock
    made: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def make(self) -> None:
        """A new key works at once."""
        name = f"key-{len(self.made)}"
        body = {"name": name, "scopes": [Scope.INFER], "expires_in_days": 1}
        key = self._post(body)
        self.made.append({"body": body, "made_at": self.clock.now(), **key})
        assert self._is_good(key["key"]), "a new key is refused"

    def repeat_last(self) -> None:
        """The last key's request, sent again, is answered with the same key while that is kept."""
        if not self.made:
            return
        last = self.made[-1]
        age = self.clock.now() - last["made_at"]
        if abs(age - KEPT_FOR) < CLOSE:
            return
        again = self._post(last["body"])
        if age < KEPT_FOR:
            assert again["id"] == last["id"], f"carried out again after {age}"
            self.counts["repeated"] += 1
        else:
            self.counts["carried_out_again" if again["id"] != last["id"] else "repeated"] += 1

    def check(self) -> None:
        """Each is good exactly while the server's clock shows less than its end."""
        for key in self.made:
            left = datetime.fromisoformat(key["expires_at"]) - self.clock.now()
            if abs(left) < CLOSE:
                continue
            is_due = left > timedelta()
            assert self._is_good(key["key"]) == is_due, f"{left} before its end: not {is_due}"
            self.counts["good" if is_due else "ended"] += 1

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"idempotency-key": body["name"]}
        answer = self.caller.http.post("/v1/keys", json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def _is_good(self, key: str) -> bool:
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.get(f"{self.caller.url}/v1/models", headers=headers)
        if answer.is_success:
            return True
        assert answer.json()["error"]["code"] == "invalid_api_key", answer.text
        return False


@dataclass
class Scenario:
    """The jumps, and what must go on between them."""

    mortal: MortalServer
    clock: WallClock
    callers: Callers
    keys: Keys
    pushes: Pushes
    deleted: list[str] = field(default_factory=list)

    async def run(self, num_jumps: int) -> None:
        draw = random.Random(self.callers.seed)
        async with self.callers.asking():
            for number in range(num_jumps):
                await asyncio.to_thread(self.keys.make)
                await asyncio.sleep(draw.uniform(1, 4))
                jump = timedelta(seconds=JUMPS[number % len(JUMPS)])
                self.clock.set(self.clock.offset + jump)
                await asyncio.to_thread(wait_for, self._has_jumped)
                await asyncio.to_thread(self.keys.repeat_last)
                await asyncio.to_thread(self.keys.check)
                async with asyncio.timeout(BETWEEN_SECONDS):
                    await self._go_on()
                print(f"{number + 1} jumps, now {self.clock.offset}", file=sys.stderr)

    def _has_jumped(self) -> bool:
        """The server's own clock shows what was set."""
        date = httpx.get(f"{self.mortal.url}/health").headers["date"]
        return abs(parsedate_to_datetime(date) - self.clock.now()) < CLOSE

    async def _go_on(self) -> None:
        num_pushes = len(self.pushes.ready)
        await self.callers.until_told(ANSWERS_BETWEEN)
        await asyncio.to_thread(self._delete_one)
        while len(self.pushes.ready) < num_pushes + 2:  # one of them began behind the jump
            await asyncio.sleep(0.05)

    def _delete_one(self) -> None:
        name = wait_for(lambda: next(iter(self.pushes.ready.keys() - self.deleted), None))
        assert name is not None
        self.deleted.append(name)
        answer = self.keys.caller.http.delete(f"/v1/adapters/{name}", timeout=BETWEEN_SECONDS)
        assert answer.is_success, answer.text


def find_library() -> Path:
    """libfaketime for programs with threads. Skips, or fails under CI, where there is none."""
    need_program("faketime", package="faketime")
    return next(Path("/usr/lib").glob(LIBRARY))


def soak(num_jumps: int, home: Path, seed: int) -> dict[str, object]:
    """What was charged and refused. Raises AssertionError if it is not what the module says."""
    library = find_library()
    base = make_tiny_llama(home / "base")
    adapter = make_adapter(base, home / "adapter", seed=1)
    clock = WallClock(home / "clock")
    clock.set(timedelta())
    with mortal_server(
        base, home / "data", engine=PRODUCT_ENGINE, **clock.environment(library)
    ) as mortal:
        mortal.start()
        caller, limited = (mortal.as_server().make_caller(slug) for slug in ("acme", "limited"))
        database = mortal.as_server().database
        limit(database, limited.tenant_id, requests_per_minute=REQUESTS_PER_MINUTE)
        database.close()
        caller.push(adapter, "bot")
        callers = Callers(mortal, caller, ["bot", base.name], seed, least_tokens_of)
        keys = Keys(caller, clock)
        with (
            pushing(caller, adapter) as pushes,
            asking_all_the_time(limited, base.name) as passes,
        ):
            scenario = Scenario(mortal, clock, callers, keys, pushes)
            asyncio.run(scenario.run(num_jumps))
        assert is_alive(mortal.pid), "the server has died"
        lost = sorted(set(pushes.ready) - ready_adapters(caller) - set(scenario.deleted))
        caller.close()
        exit_status = mortal.stop()
        rows = check_exact(mortal, callers)
    assert lost == [], f"acknowledged pushes are gone: {lost}"
    assert exit_status == 0, f"the server's exit status is {exit_status}"
    assert not callers.broken, f"requests without an answer, or a whole one: {callers.broken}"
    unpublished = {*callers.codes, *pushes.failed, *passes.codes} - set(ERROR_CODES)
    assert not unpublished, f"failures without a published code: {unpublished}"
    passes.check()
    return {
        "jumps": num_jumps,
        **figures_of(callers, rows.values(), pushes),
        "deleted": len(scenario.deleted),
        "keys": keys.counts,
        "limited": {
            "passed": len(passes.times),
            "seconds": round(passes.times[-1][1] - passes.times[0][0], 1),
            "longest_gap_seconds": round(passes.longest_gap_seconds, 2),
            "codes": passes.codes,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jumps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            figures = soak(arguments.jumps, Path(home), arguments.seed)
        except pytest.skip.Exception as exc:
            print(f"left out: {exc}", file=sys.stderr)
            return 0
        except (AssertionError, TimeoutError, pytest.fail.Exception) as exc:
            print(f"jumps of the clock are not borne: {exc!r}", file=sys.stderr)
            return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
