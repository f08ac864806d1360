"""Checks grammars in a separate process: `python -m loraplex.engine.grammars.check_process`.

A grammar is untrusted input for the compiler. It is compiled here first, with limits on time and
memory, and only then by the engine, so a grammar that crashes the compiler does not crash the
engine. Standard input carries an `introduction`, then one `question` per line. Each is answered by
one line of JSON on standard output: null, or the reason of the refusal. The process ends at the end
of its input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidGrammar
from .spec import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from .compiler import GrammarCompiler

CPU_SECONDS = 2.0
"""For one grammar."""
MEMORY_BYTES = 128 << 20
"""Address space in addition to that of the process at its start; all grammars share it."""
REFUSED_SIGNALS = frozenset({signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS})
"""The signals of a process killed by a grammar: too much time or memory, or a fault of the
library."""


TOO_COSTLY = "it takes more time or memory to compile than is allowed"


class CheckVocabulary:
    """A token per byte, and the base's special tokens: all that compilation depends on."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, vocab_size: int, special: Mapping[int, str], end_token_id: int) -> None:
        self.eos_token_id = end_token_id
        self.special_token_ids: Sequence[int] = sorted(special)
        self.tokens: Sequence[bytes] = [
            *(special.get(token, "").encode() for token in range(vocab_size)),
            *(bytes([value]) for value in range(256)),
        ]
        self._first_byte = vocab_size

    def __call__(self, text: str) -> list[int]:
        return [self._first_byte + value for value in text.encode()]


def question(spec: GrammarSpec) -> bytes:
    return json.dumps([spec.kind.value, spec.text]).encode() + b"\n"


def introduction(vocab_size: int, special: Mapping[int, str], end_token_id: int) -> bytes:
    """The first line; the arguments of `CheckVocabulary`."""
    return json.dumps([vocab_size, list(special.items()), end_token_id]).encode() + b"\n"


def main() -> None:
    from .compiler import GrammarCompiler  # imported here: the client needs no llguidance

    lines = sys.stdin.buffer
    vocab_size, special, end_token_id = json.loads(lines.readline())
    compiler = GrammarCompiler(CheckVocabulary(vocab_size, dict(special), end_token_id))
    _limit_memory()
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        refusal = _refusal(compiler, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(refusal) + "\n")
        sys.stdout.flush()


def _refusal(compiler: GrammarCompiler, line: bytes) -> str | None:
    kind, text = json.loads(line)
    try:
        compiler.compile(GrammarSpec(GrammarKind(kind), text))
    except InvalidGrammar as exc:
        return str(exc)
    except MemoryError:
        return TOO_COSTLY
    return None


def _limit_memory() -> None:
    """Limits memory relative to the present use, where the system reports it."""
    try:
        with open("/proc/self/statm") as file:
            num_pages = int(file.read().split()[0])
    except OSError:
        return
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
