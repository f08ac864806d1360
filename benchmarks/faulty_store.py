"""Makes the adapter store hang, return wrong data and fail under load, and checks the consequences.

    make soak     or: PYTHONPATH=.src:tests python -m benchmarks.faulty_store [--seconds 180]

A real server stores its adapters in an emulated S3 behind a proxy that injects faults; it waits at
most a second for the store, and twice. Two pinned adapters are resident. The engine's caches hold a
few of the others, and blocks are removed from the disk cache after seconds (files that were handed
out stay for a minute), so they must be fetched repeatedly. Every adapter is a canary whose answer
names it. Meanwhile other clients push and delete. Prints one JSON object; exits with 1 unless

- no answer came from other weights than those of the requested adapter or the base,
- every failure has a published code,
- the base and the resident adapters were served in every phase, and never refused,
- cold adapters were served in every phase in which the store works,
- when the store works again, no version or upload stays unfinished, every push that was answered
  `ready` answers correctly, deleted adapters are not found, and the server exits with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from sqlalchemy import func, select

from loraplex.api.contract.error_codes import ERROR_CODES
from loraplex.platform.adapters.states import UNFINISHED_STATES, UploadState
from loraplex.platform.models import AdapterVersion, Upload
from support.beside_load import Pushes, pushing, repeating
from support.canaries import MARKERS, make_canary_adapter, make_canary_base
from support.fault_proxy import Fault, FaultProxy, Request, Weather
from support.s3 import CREDENTIALS, emulated_s3, make_bucket
from support.server import Caller, ServerUnderTest, serving
from support.waiting import wait_for

PHASES_PER_ROUND = 4
RANK = 256
"""Padded with zeros: a block of 128 KiB, of which the engine's caches hold eight each."""
NUM_PINNED, NUM_COLD, NUM_PUSHED = 2, 24, 12
NUM_NEAR_CALLERS, NUM_COLD_CALLERS = 3, 6
NUM_TOKENS = 4
PAUSE_SECONDS = 0.05
CACHED_SECONDS = 2.0
ANSWER_SECONDS = 30.0
"""A request that has no answer then is taken for one that never ends."""
WELL_AGAIN_SECONDS = 120.0
STORE = "s3://adapters/p?endpoint={}&addressing_style=path&read_timeout=1&max_attempts=2"
OPTIONS = ("--arena-gib", "0.001", "--host-cache-gib", "0.001", "--loader-duty", "1")
ENVIRONMENT = {
    **CREDENTIALS,
    "LORAPLEX_DISK_CACHE_BYTES": str(512 << 10),
    "LORAPLEX_ADAPTER_WAIT_SECONDS": "2",
}


class Phase(NamedTuple):
    """How the store behaves for a while."""

    reads: Sequence[Fault] = ()
    writes: Sequence[Fault] = ()
    others: Sequence[Fault] = ()
    """Questions whether an object is there, deletions and listings."""
    share: float = 1.0
    """Of the requests that are harmed, where they can be."""

    def weather(self, draw: random.Random) -> Weather:
        def choose(request: Request) -> Fault | None:
            if request.method == "PUT":
                faults = self.writes
            else:
                faults = self.reads if request.reads_object else self.others
            return draw.choice(faults) if faults and draw.random() < self.share else None

        return choose


_ERRORS = (Fault.SERVER_ERROR, Fault.SLOW_DOWN, Fault.DENIED, Fault.RESET, Fault.GARBAGE)
_LIES = (
    *(Fault.BIT_FLIP, Fault.OTHER_OBJECT, Fault.WRONG_OBJECT, Fault.TRUNCATED),
    *(Fault.SHORT, Fault.LONG, Fault.MISSING),
)
WELL = "well"
PHASES: Mapping[str, Phase] = {
    "hangs": Phase((Fault.HANG, Fault.HANG_WITHIN), (Fault.HANG,), (Fault.HANG,)),
    "lies": Phase(_LIES, (Fault.UNKEPT,), share=0.7),
    "fails": Phase((*_ERRORS, Fault.RESET_WITHIN), _ERRORS, _ERRORS, share=0.8),
    WELL: Phase(),
}


@dataclass
class Seen:
    """What callers have met; answers and codes by phase and by whom they asked for."""

    answered: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    slowest_near_seconds: dict[str, float] = field(default_factory=dict)
    num_deleted: int = 0
    violations: list[str] = field(default_factory=list)

    def refuse(self, whom: str, code: str) -> None:
        self.refused.setdefault(whom, Counter())[code] += 1
        if code not in ERROR_CODES:
            self.violations.append(f"{whom}: a failure without a published code: {code}")


@dataclass
class Callers:
    """They ask for adapters, and compare each answer with the only right one."""

    url: str
    key: str
    near: Mapping[str, str]
    """What the base and the resident adapters answer, by model."""
    cold: Mapping[str, str]
    seen: Seen
    phase: str = WELL

    async def ask_for(self, seconds: float) -> None:
        """All of them, for so long."""
        ends_at = time.monotonic() + seconds
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=ANSWER_SECONDS
        ) as client:
            near = (self._ask_on(client, "near", n, ends_at) for n in range(NUM_NEAR_CALLERS))
            cold = (self._ask_on(client, "cold", n, ends_at) for n in range(NUM_COLD_CALLERS))
            await asyncio.gather(*near, *cold)

    async def _ask_on(
        self, client: httpx.AsyncClient, kind: str, number: int, ends_at: float
    ) -> None:
        draw = random.Random(f"{kind}/{number}")
        answers = self.near if kind == "near" else self.cold
        while time.monotonic() < ends_at:
            await self._ask(client, kind, *draw.choice(list(answers.items())))
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, client: httpx.AsyncClient, kind: str, model: str, expected: str) -> None:
        whom, begun_at = f"{self.phase}/{kind}", time.monotonic()
        try:
            answer = await client.post("/v1/completions", json=question(model))
            body = answer.json()
        except (httpx.TransportError, ValueError) as exc:
            self.seen.violations.append(f"{whom}: {exc!r}")
            return
        if not answer.is_success:
            self.seen.refuse(whom, body["error"]["code"])
            return
        self.seen.answered[whom] += 1
        if kind == "near":
            slowest = self.seen.slowest_near_seconds
            slowest[whom] = max(slowest.get(whom, 0.0), time.monotonic() - begun_at)
        if (said := body["choices"][0]["text"]) != expected:
            self.seen.violations.append(f"{whom}: {model} said {said!r} instead of {expected!r}")


def question(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": "Hello",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def say(caller: Caller, model: str) -> str:
    """What a model answers. Fails if it does not."""
    answer = caller.http.post("/v1/completions", json=question(model))
    assert answer.is_success, f"{model}: {answer.text}"
    text: str = answer.json()["choices"][0]["text"]
    return text


def text_of(marker: int) -> str:
    """What its canary says: the tokenizer's first tokens are the printable bytes in their order."""
    return chr(ord("!") + marker) * NUM_TOKENS


def drop_old_blocks(cache: Path) -> None:
    """Take from the disk cache what the engine has had time to open."""
    latest = time.time() - CACHED_SECONDS
    for block in cache.glob("*.block"):
        with suppress(FileNotFoundError):
            if block.stat().st_mtime < latest:
                block.unlink()


@contextmanager
def deleting(caller: Caller, pushes: Pushes, seen: Seen) -> Iterator[set[str]]:
    """Delete pushed adapters, one at a time; the names of all that were tried."""
    tried: set[str] = set()
    draw = random.Random(0)

    def delete() -> None:
        names = sorted(set(pushes.ready) - tried)
        if len(names) < 2:
            return
        tried.add(name := draw.choice(names))
        try:
            answer = caller.http.delete(f"/v1/adapters/{name}", timeout=WELL_AGAIN_SECONDS)
        except httpx.TransportError as exc:
            seen.violations.append(f"deletion: {exc!r}")
            return
        if answer.is_success:
            seen.num_deleted += 1
        else:
            seen.refuse("deletion", answer.json()["error"]["code"])

    with repeating(delete):
        yield tried


async def run_phases(
    callers: Callers, proxy: FaultProxy, seconds: float, num_rounds: int, seed: int
) -> None:
    draw = random.Random(seed)
    for number in range(num_rounds):
        for name, phase in PHASES.items():
            callers.phase, proxy.weather = name, phase.weather(draw)
            await callers.ask_for(seconds)
        print(f"{number + 1} rounds, {callers.seen.answered.total()} answers", file=sys.stderr)


def num_unfinished(server: ServerUnderTest) -> int:
    """Versions that are neither ready nor refused nor gone, and uploads under examination."""
    database = server.database
    with database.platform_transaction(read_only=True) as session:
        counts = (
            select(func.count())
            .select_from(AdapterVersion)
            .where(AdapterVersion.state.in_(UNFINISHED_STATES)),
            select(func.count()).select_from(Upload).where(Upload.state == UploadState.VALIDATING),
        )
        num_found = sum(session.scalars(query).one() for query in counts)
    database.close()
    return num_found


def check_well_again(
    server: ServerUnderTest, caller: Caller, expected: Mapping[str, str], gone: set[str]
) -> None:
    """Fails unless everything answers in time, and nothing is on its way any more."""
    wait_for(lambda: num_unfinished(server) == 0, seconds=WELL_AGAIN_SECONDS)
    for model, text in expected.items():
        wait_for(lambda model=model: is_served(caller, model), seconds=WELL_AGAIN_SECONDS)  # type: ignore[misc]
        assert (said := say(caller, model)) == text, f"{model} said {said!r} instead of {text!r}"
    for model in gone:
        answer = caller.http.post("/v1/completions", json=question(model))
        assert answer.json()["error"]["code"] == "model_not_found", f"{model}: {answer.text}"


def is_served(caller: Caller, model: str) -> bool:
    return caller.http.post("/v1/completions", json=question(model)).is_success


def pin(caller: Caller, name: str) -> None:
    answer = caller.http.put(f"/v1/adapters/{name}/versions/1/pin", json={"ttl_seconds": None})
    assert answer.is_success, answer.text


def soak(seconds: float, home: Path, seed: int) -> dict[str, object]:
    """What was seen. Raises AssertionError if it is not what the module says."""
    num_rounds = max(1, round(seconds / 60))
    base = make_canary_base(home / "base")
    markers = dict(enumerate(MARKERS))
    folders = [
        make_canary_adapter(base, home / f"adapter-{number}", marker=markers[number], rank=RANK)
        for number in range(NUM_PINNED + NUM_COLD + NUM_PUSHED)
    ]
    says = {folder: text_of(markers[number]) for number, folder in enumerate(folders)}
    own, pushed = folders[: NUM_PINNED + NUM_COLD], folders[NUM_PINNED + NUM_COLD :]
    seen = Seen()
    with emulated_s3() as endpoint, FaultProxy(endpoint) as proxy:
        make_bucket(endpoint, "adapters")
        store = STORE.format(proxy.url)
        with serving(base, home / "data", "--store", store, *OPTIONS, **ENVIRONMENT) as server:
            caller = server.make_caller("acme")
            for folder in own:
                caller.push(folder, folder.name)
            for folder in own[:NUM_PINNED]:
                pin(caller, folder.name)
            expected = {base.name: say(caller, base.name)}
            expected |= {folder.name: says[folder] for folder in own}
            near = {base.name, *(folder.name for folder in own[:NUM_PINNED])}
            callers = Callers(
                server.url,
                caller.key,
                {name: text for name, text in expected.items() if name in near},
                {name: text for name, text in expected.items() if name not in near},
                seen,
            )
            with (
                repeating(lambda: drop_old_blocks(home / "data" / "cache")),
                pushing(caller, *pushed) as pushes,
                deleting(caller, pushes, seen) as deleted,
            ):
                phase_seconds = seconds / (num_rounds * PHASES_PER_ROUND)
                asyncio.run(run_phases(callers, proxy, phase_seconds, num_rounds, seed))
            kept = {name: says[folder] for name, folder in pushes.ready.items()}
            expected |= {name: text for name, text in kept.items() if name not in deleted}
            check_well_again(server, caller, expected, deleted)
        for code in pushes.failed.keys() - ERROR_CODES:
            seen.violations.append(f"push: a failure without a published code: {code}")
        check(seen)
        assert server.process.returncode == 0, f"exit status {server.process.returncode}"
    return {
        "rounds": num_rounds,
        "answered": seen.answered,
        "refused": seen.refused,
        "slowest_near_seconds": {k: round(s, 2) for k, s in seen.slowest_near_seconds.items()},
        "pushes": {"ready": len(pushes.ready), "failed": pushes.failed},
        "deleted": seen.num_deleted,
        "answered_rightly_in_the_end": len(expected),
        "faults": {str(fault): number for fault, number in proxy.num_faults.items()},
    }


def check(seen: Seen) -> None:
    """Fails unless everything that was seen was allowed."""
    violations = list(seen.violations)
    for phase in PHASES:
        if not seen.answered[f"{phase}/near"]:
            violations.append(f"{phase}: the base and resident adapters were not answered")
        if refused := seen.refused.get(f"{phase}/near"):
            violations.append(f"{phase}: the base or a resident adapter was refused: {refused}")
    if not seen.answered[f"{WELL}/cold"]:
        violations.append("cold adapters were not answered")
    assert not violations, "\n".join(violations[:50])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="a round a minute, at least 1")
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            figures = soak(arguments.seconds, Path(home), arguments.seed)
        except AssertionError as exc:
            print(f"a faulty store is not borne: {exc}", file=sys.stderr)
            return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
