"""The cost of grammars per step: masks for all rows, with vocabularies of different sizes.

Each request has its own schema and samples randomly from the tokens that its grammar allows. It
measures the additional work of a step with grammars: computing the masks, applying them to the
logits and advancing by the sampled tokens, as CPU time of all threads. `make bench-grammars` prints
p50, p99 and the maximum over the steps, then the compilation cost, and finally one line of JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from benchmarks.report import parse_options, print_report

from loraplex.engine.execution.grammar_masks import restrict
from loraplex.engine.grammars.compiler import GrammarCompiler, make_executor
from loraplex.engine.grammars.matcher import Matcher
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from support.grammars import random_schema

VOCAB_SIZES = (2_000, 32_000, 128_000)
BATCHES = (1, 16, 64)
NUM_STEPS = 200
GRAMMARS: Mapping[str, GrammarSpec] = {
    "small object": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(1))),
    "any object": GrammarSpec(GrammarKind.JSON_OBJECT),
    "500 properties": GrammarSpec(
        GrammarKind.JSON_SCHEMA,
        json.dumps({"properties": {f"property_{i}": {"type": "string"} for i in range(500)}}),
    ),
    "1,000 choices": GrammarSpec(
        GrammarKind.CHOICE, json.dumps([f"choice number {i}" for i in range(1000)])
    ),
    "regex": GrammarSpec(GrammarKind.REGEX, r"[a-z0-9._]{1,64}@[a-z0-9-]{1,63}\.(com|org)"),
    "unicode": GrammarSpec(GrammarKind.REGEX, r"(\p{L}|\p{N}){1,500}\w{3,300}"),
}


class RandomVocabulary:
    """Bytes, then words of one to ten characters."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None
    eos_token_id = 0

    def __init__(self, size: int) -> None:
        rng = random.Random(size)
        words = {b"</s>": None, **{bytes([value]): None for value in range(256)}}
        while len(words) < size:
            letters = rng.choices("etaoinshrdlucmfwypvbgkqjxz,.:{}[]\"'0123456789 éü你", k=9)
            word = "".join(letters)[: rng.randint(2, 9)]
            words[(" " * (rng.random() < 0.4) + word).encode()] = None
        self.tokens: Sequence[bytes] = list(words)
        self.special_token_ids: Sequence[int] = [0]

    def __call__(self, text: str) -> list[int]:
        return [1 + value for value in text.encode()]


def make_request(compiler: GrammarCompiler, spec: GrammarSpec, name: str) -> Request:
    submitted = GenerationRequest(name, "acme", [0], SamplingParams(grammar=spec))
    request = Request(submitted, CacheNamespace("acme", "runtime", None), 0, 0.0, None)
    request.matcher = make_matcher(compiler, spec)
    return request


def make_matcher(compiler: GrammarCompiler, spec: GrammarSpec) -> Matcher:
    automaton = compiler.compile(spec)
    return Matcher(automaton, end_token_ids=frozenset({0}), ignores_end=False)


def step_seconds(compiler: GrammarCompiler, batch: int, vocab_size: int, steps: int) -> list[float]:
    """Of each step, for requests of the small schemas."""
    executor = make_executor()
    specs = [
        GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(seed)))
        for seed in range(batch)
    ]
    requests = [make_request(compiler, spec, str(i)) for i, spec in enumerate(specs)]
    logits = torch.randn(batch, vocab_size)
    seconds = []
    for _ in range(steps):
        start = time.process_time()
        allowed, failed = restrict(requests, logits, executor, vocab_size)
        masked = time.process_time()
        assert not failed
        drawn = (allowed.isfinite() * torch.rand_like(allowed)).argmax(-1).tolist()
        drew = time.process_time()
        for index, token in enumerate(drawn):
            matcher = requests[index].matcher
            if token == 0 or matcher is None:
                requests[index].matcher = None
            else:
                matcher.accept([token])
        seconds.append(time.process_time() - drew + masked - start)
        for index, request in enumerate(requests):
            if request.matcher is None:
                request.matcher = make_matcher(compiler, specs[index])
    return seconds


def compile_row(compiler: GrammarCompiler, name: str, spec: GrammarSpec) -> dict[str, object]:
    start = time.process_time()
    automaton = compiler.compile(spec)
    compiled = time.process_time()
    copied = automaton.deep_copy()
    end = time.process_time()
    assert not copied.is_error()
    return {
        "grammar": name,
        "compile_ms": 1e3 * (compiled - start),
        "copy_us": 1e6 * (end - compiled),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(__doc__ or "", arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = (500,) if options.is_smoke else VOCAB_SIZES
    batches = (2,) if options.is_smoke else BATCHES
    steps = 3 if options.is_smoke else NUM_STEPS
    rows: list[dict[str, object]] = []
    compiling: list[dict[str, object]] = []
    for vocab_size in sizes:
        compiler = GrammarCompiler(RandomVocabulary(vocab_size))
        for batch in batches:
            seconds = sorted(step_seconds(compiler, batch, vocab_size, steps))
            row = {"vocabulary": vocab_size, "requests": batch}
            figures = (statistics.median(seconds), seconds[int(0.99 * len(seconds))], seconds[-1])
            names = ("p50_ms", "p99_ms", "max_ms")
            rows.append(
                row | {name: 1e3 * value for name, value in zip(names, figures, strict=True)}
            )
        compiling = [compile_row(compiler, name, spec) for name, spec in GRAMMARS.items()]
    print_report("grammars", rows, ("compiling_at_the_largest_vocabulary", compiling))
    return 0


if __name__ == "__main__":
    sys.exit(main())
