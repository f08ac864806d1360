"""Tests the adapter path with formats, hostile and broken uploads, faults and crashes.

    make adapter-evidence [SOAK=1] [ARGS='--quick --seed 1 --only malformed broken']

Prints one JSON object. Exits with 1 if a bar is missed, and names the bar on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loraplex.adapters.failpoints import FAILPOINTS

MAX_RESERVED_OVER_TRUE = 1.1


@dataclass(frozen=True)
class Amount:
    """How much is tried."""

    seed: int
    malformed: int = 1_000
    faulty_loads: int = 1_000
    canary_requests: int = 20_000
    composed_canary_requests: int = 20_000
    activated_canary_requests: int = 20_000
    state_canary_requests: int = 20_000
    kv_canary_requests: int = 4_000
    crashes_per_point: int = 1
    crash_points: tuple[str, ...] = FAILPOINTS


def _quick(seed: int) -> Amount:
    return Amount(
        seed,
        malformed=200,
        faulty_loads=200,
        canary_requests=4_000,
        composed_canary_requests=2_000,
        activated_canary_requests=2_000,
        state_canary_requests=400,
        kv_canary_requests=400,
        crash_points=FAILPOINTS[seed % 5 :: 5],
    )


def _soak(seed: int) -> Amount:
    return Amount(
        seed,
        malformed=10_000,
        faulty_loads=10_000,
        canary_requests=100_000,
        crashes_per_point=5,
    )


def features(_amount: Amount) -> dict[str, Any]:
    """Each row of docs/formats.md with an adapter that PEFT wrote, against PEFT's logits."""
    proofs = _named("feature_proofs", "prove_all_features")()
    return {name: proof.as_report() for name, proof in proofs.items()}


def malformed(amount: Amount) -> dict[str, Any]:
    """Each in the process of a push, a share of them by every processor; as many again that use
    every served feature, in this process."""
    run = _named("malformed", "run_malformed")
    examine_in_child = _named("malformed", "examine_in_child")
    num_workers = os.cpu_count() or 1
    share = -(-amount.malformed // num_workers)
    with ThreadPoolExecutor(num_workers) as threads:
        outcomes = list(
            threads.map(
                lambda worker: run(
                    share, seed=amount.seed * num_workers + worker, examiner=examine_in_child
                ),
                range(num_workers),
            )
        )
    of_each_feature = -(-amount.malformed // len(_named("malformed_features", "SERVED")))
    run_features = _named("malformed_features", "run_malformed_features")
    outcomes.append(run_features(of_each_feature, seed=amount.seed))
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        for kind in ("crashes", "hangs", "uncoded", "misjudged"):
            counts[kind] += len(getattr(outcome, kind))
            for line in getattr(outcome, kind):
                _note(f"{kind}: {line}")
        for kind in ("tried", "refused", "good_refused"):
            counts[kind] += getattr(outcome, kind)
    return dict(counts)


def broken(_amount: Amount) -> dict[str, Any]:
    """Adapters as people really upload them."""
    base = _named("models", "make_tiny_llama")
    with TemporaryDirectory() as directory:
        faults = _named("broken", "run_broken")(base(Path(directory) / "base"))
    for name, fault in faults.items():
        if fault:
            _note(f"broken: {name}: {fault}")
    return {"tried": len(faults), "right_code": sum(not fault for fault in faults.values())}


def faulty_loads(amount: Amount) -> dict[str, Any]:
    """Loads through a proxy that harms the store's answers."""
    found = _named("faulty_loads", "run_faulty_loads")(amount.faulty_loads, amount.seed)
    names = ("tried", "corrupt_served", "corrupt_files", "uncoded", "objects", "recovered")
    return {name: getattr(found, name) for name in names}


def canaries(amount: Amount) -> dict[str, Any]:
    """Requests whose answers name their adapter, under eviction and loading."""
    result: dict[str, Any] = _named("canaries", "run_canaries")(amount.canary_requests, amount.seed)
    return result


def composed_canaries(amount: Amount) -> dict[str, Any]:
    """The same, with compositions of two of a tenant's adapters, whose members are deleted."""
    result: dict[str, Any] = _named("canaries", "run_canaries")(
        amount.composed_canary_requests, amount.seed, composes=True
    )
    return result


def activated_canaries(amount: Amount) -> dict[str, Any]:
    """The same with activated LoRAs, which share what is before their invocation."""
    activated = _named("activated_canaries", "ACTIVATED")
    result: dict[str, Any] = _named("canaries", "run_canaries")(
        amount.activated_canary_requests, amount.seed, canaries=activated
    )
    return result


def state_canaries(amount: Amount) -> dict[str, Any]:
    """Requests whose answers name the adapter whose state they go on from."""
    canaries_in_states = _named("state_canaries", "IN_STATES")
    result: dict[str, Any] = _named("canaries", "run_canaries")(
        amount.state_canary_requests, amount.seed, canaries=canaries_in_states
    )
    return result


def kv_canaries(amount: Amount) -> dict[str, Any]:
    """Requests whose answers name the adapter whose prefix they read, from device or host."""
    result: dict[str, Any] = _named("canaries", "run_canaries")(
        amount.kv_canary_requests, amount.seed, canaries=_named("kv_canaries", "IN_KV")
    )
    return result


def crash_points(amount: Amount) -> dict[str, Any]:
    """`kill -9` at named points of upload, commit and delete."""
    run = _named("crash_points", "run_crash_points")
    result: dict[str, Any] = run(amount.crashes_per_point, points=amount.crash_points)
    return result


def reserved_over_true(_amount: Amount) -> float:
    """Bytes reserved for adapters of mixed ranks over what they hold."""
    return float(_named("reserved_bytes", "measure_reserved_bytes")().ratio)


SECTIONS: Mapping[str, Callable[[Amount], Any]] = {
    section.__name__: section
    for section in (
        features,
        malformed,
        broken,
        faulty_loads,
        canaries,
        composed_canaries,
        activated_canaries,
        state_canaries,
        kv_canaries,
        crash_points,
        reserved_over_true,
    )
}
BARS: Mapping[str, Callable[[Any, Amount], bool]] = {
    "features": lambda rows, _: bool(rows) and all(row["is_right"] for row in rows.values()),
    "malformed": lambda found, amount: (
        found["tried"] >= 2 * amount.malformed
        and not any(
            found[kind] for kind in ("crashes", "hangs", "uncoded", "misjudged", "good_refused")
        )
    ),
    "broken": lambda found, _: found["tried"] >= 20 and found["right_code"] == found["tried"],
    "faulty_loads": lambda found, amount: (
        found["tried"] >= amount.faulty_loads
        and not any(found[kind] for kind in ("corrupt_served", "corrupt_files", "uncoded"))
        and found["recovered"] == found["objects"]
    ),
    "canaries": lambda found, amount: (
        found["requests"] >= amount.canary_requests and not found["foreign"]
    ),
    "composed_canaries": lambda found, amount: (
        found["requests"] >= amount.composed_canary_requests and not found["foreign"]
    ),
    "activated_canaries": lambda found, amount: (
        found["requests"] >= amount.activated_canary_requests and not found["foreign"]
    ),
    "state_canaries": lambda found, amount: (
        found["requests"] >= amount.state_canary_requests and not found["foreign"]
    ),
    "kv_canaries": lambda found, amount: (
        found["requests"] >= amount.kv_canary_requests
        and not found["foreign"]
        and found["tokens_from_host"] > 0
    ),
    "crash_points": lambda found, _: (
        bool(found["tried"]) and not found["lost"] and not found["orphans"]
    ),
    "reserved_over_true": lambda ratio, _: 1.0 <= ratio <= MAX_RESERVED_OVER_TRUE,
}


def missed_bars(evidence: Mapping[str, Any], amount: Amount) -> list[str]:
    """The sections whose figures are not good enough."""
    return [name for name, found in evidence.items() if not BARS[name](found, amount)]


def _named(module: str, name: str) -> Any:
    """A section's own helper, loaded when the section is asked for."""
    return getattr(import_module(f"support.{module}"), name)


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a fifth of the numbers, as CI has it")
    size.add_argument("--soak", action="store_true", help="larger numbers: an hour and more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    options = parser.parse_args(arguments)
    make_amount = _soak if options.soak else _quick if options.quick else Amount
    amount = make_amount(options.seed)
    evidence = {}
    for name in options.only:
        _note(f"{name} ...")
        evidence[name] = SECTIONS[name](amount)
    print(json.dumps(evidence))
    missed = missed_bars(evidence, amount)
    for name in missed:
        _note(f"bar missed: {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
