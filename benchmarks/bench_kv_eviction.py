"""What KV eviction costs in answers: a needle and a copy task in long contexts.

    make bench-kv-eviction [ARGS='--length 1000 --json FILE']

The model is `induction_model`: with its full cache both tasks are solved. Contexts are random
tokens of which none comes twice.

*needle*: the last token of the prompt repeats one of the context; right is an answer of the four
tokens that followed it there. The first of them is computed before anything is evicted.
*copy*: the prompt ends with its own first 16 tokens again; right is the share of the next 64 tokens
that continue the copy, as far as it is unbroken. They were not asked for when the prompt was
compressed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import NamedTuple

from benchmarks.induction_model import VOCAB_SIZE, save_induction_model

from loraplex.engine.kv_policy import EvictionMethod, KvPolicy
from support.engine import LocalEngine

NEEDLE_TOKENS = 4
CUE_TOKENS, COPY_TOKENS = 16, 64
BUDGETS = (64, 128, 256, 512)
FIRST_NEEDLE = 0.05
"""Of the context, before which no needle lies: its neighbors would be missing."""


class Task(NamedTuple):
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Result:
    policy: str
    budget: int
    """Tokens kept of the context, per layer and KV head."""
    needle_right: float
    """The share of needles whose four tokens are all right."""
    full_right: float
    """The same with the full cache."""
    copy_right: float
    full_copy_right: float


def needles(count: int, length: int, rng: Random) -> Iterator[Task]:
    """At depths that are spread evenly."""
    for number in range(count):
        context = rng.sample(range(VOCAB_SIZE), length)
        depth = FIRST_NEEDLE + (1 - 2 * FIRST_NEEDLE) * number / max(count - 1, 1)
        place = int(depth * length)
        answer = context[place + 1 : place + 1 + NEEDLE_TOKENS]
        yield Task([*context, context[place]], answer)


def copies(count: int, length: int, rng: Random) -> Iterator[Task]:
    for _ in range(count):
        context = rng.sample(range(VOCAB_SIZE), length)
        cue = context[:CUE_TOKENS]
        yield Task([*context, *cue], context[CUE_TOKENS : CUE_TOKENS + COPY_TOKENS])


def serve(engine: LocalEngine, tasks: Sequence[Task], policy: KvPolicy | None) -> list[float]:
    """For each task the share of its answer up to the first wrong token."""
    ids = [
        engine.submit(task.prompt, kv_policy=policy, max_tokens=len(task.answer)) for task in tasks
    ]
    engine.run()
    shares = []
    for request_id, task in zip(ids, tasks, strict=True):
        pairs = zip(engine.answers[request_id].token_ids, task.answer, strict=True)
        right = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
        shares.append(len(right) / len(task.answer))
    return shares


def measure(
    folder: Path, *, length: int, num_needles: int, num_copies: int, budgets: Sequence[int]
) -> list[Result]:
    base, rng = save_induction_model(folder / "base"), Random(0)
    engine = LocalEngine(base, folder, kv_cache_bytes=1 << 28, prefix_caching=False)
    asked, copied = list(needles(num_needles, length, rng)), list(copies(num_copies, length, rng))

    def right(policy: KvPolicy | None) -> tuple[float, float]:
        found = [share == 1 for share in serve(engine, asked, policy)]
        return sum(found) / len(found), sum(serve(engine, copied, policy)) / len(copied)

    full_right, full_copy_right = right(None)
    results = []
    for method in EvictionMethod:
        for budget in budgets:
            needle_right, copy_right = right(KvPolicy(method, budget))
            result = Result(method, budget, needle_right, full_right, copy_right, full_copy_right)
            results.append(result)
    engine.close()
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=1000, help="tokens of a context")
    parser.add_argument("--needles", type=int, default=50)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(
            Path(folder),
            length=options.length,
            num_needles=options.needles,
            num_copies=options.copies,
            budgets=options.budgets,
        )
    print(f"{options.length} tokens, {options.needles} needles, {options.copies} copies")
    print(f"{'policy':8}{'budget':>8}{'needle':>9}{'copy':>9}")
    print(f"{'full':8}{'':8}{results[0].full_right:9.0%}{results[0].full_copy_right:9.0%}")
    for each in results:
        print(f"{each.policy:8}{each.budget:8}{each.needle_right:9.0%}{each.copy_right:9.0%}")
    if options.json:
        rows = [asdict(result) for result in results]
        report = {"length": options.length, "needles": options.needles, "copies": options.copies}
        options.json.write_text(json.dumps({**report, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
