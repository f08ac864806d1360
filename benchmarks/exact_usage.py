"""Kill servers and engines again and again under load, and compare the ledger with the engine.

    make soak          or: PYTHONPATH=.src:tests python -m benchmarks.exact_usage [--kills 20]

The real engine serves a tiny model and an adapter. Every process dies by SIGKILL at a random
moment; what its engine had counted is read from its journal past the product's own code. Prints one
JSON object; exits 1 unless every row of the ledger is what was counted, to the token, and no caller
has seen a token that nobody pays for.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from support.exact_usage import Callers, check_exact, kill_under_load
from support.models import make_adapter, make_tiny_llama
from support.mortal_server import REAL_ENGINE, mortal_server


def least_tokens_of(text: str) -> int:
    """A piece of text of an answer is that of one token at least."""
    return min(len(text), 1)


def soak(num_kills: int, home: Path, seed: int) -> dict[str, object]:
    """What was killed and what was charged. Raises AssertionError if that is not what was used."""
    base = make_tiny_llama(home / "base")
    adapter = make_adapter(base, home / "adapter", seed=1)
    with mortal_server(base, home / "data", engine=REAL_ENGINE) as mortal:
        mortal.start()
        caller = mortal.as_server().make_caller("acme")
        caller.push(adapter, "bot")
        callers = Callers(mortal, caller, ["bot", base.name], seed, least_tokens_of)
        killed = kill_under_load(callers, num_kills)
        caller.close()
        mortal.stop()
        rows = check_exact(mortal, callers).values()
    return {
        "killed": killed,
        "requests": len(rows),
        "aborted": sum(row.finish_reason == "aborted" for row in rows),
        "whole_answers": len(callers.usages),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "completion_tokens": sum(row.completion_tokens for row in rows),
        "codes": callers.codes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            figures = soak(arguments.kills, Path(home), arguments.seed)
        except AssertionError as exc:
            print(f"the ledger is not what was used: {exc}", file=sys.stderr)
            return 1
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
