"""Grammars in the engine's loop: compiled on another thread, advanced by sampled tokens."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...adapters.tenant_threads import TenantThreads
from ..errors import EngineError, GrammarFailed, GrammarNotServed
from ..grammars.cache import GrammarCache, GrammarKey
from ..grammars.matcher import Automaton, Executor, Matcher
from ..grammars.spec import GrammarSpec
from ..request import Request
from .grammar_masks import Restricted, restrict

CACHE_BYTES = 256 << 20

logger = logging.getLogger(__name__)

Compile = Callable[[GrammarSpec], Automaton]
"""Raises InvalidGrammar."""


class Backend(NamedTuple):
    """The implementation that serves grammars."""

    compile: Compile
    """Runs on another thread than the loop's."""
    executor: Executor
    end_token_ids: frozenset[int]
    vocab_size: int
    """The tokens that its grammars know: those of the base's logits."""


class _Pending(NamedTuple):
    request: Request
    compiled: Future[Automaton]


class Grammars:
    """Requests whose grammar is being compiled; the scheduler holds them meanwhile."""

    def __init__(self, backend: Backend | None, *, cache_bytes: int = CACHE_BYTES) -> None:
        """`backend`: None where grammars are not served."""
        self._backend = backend
        self._cache: GrammarCache[Future[Automaton]] = GrammarCache(cache_bytes)
        self.pending: dict[str, _Pending] = {}
        """By id, the requests whose grammar is not ready."""
        self._thread = TenantThreads("grammars", 1)

    @property
    def is_served(self) -> bool:
        return self._backend is not None

    def prepare(self, request: Request) -> None:
        """Compile the request's grammar; `poll` gives the request back. Raises GrammarNotServed."""
        if self._backend is None:
            raise GrammarNotServed
        key = _key(request)
        compiled = self._cache.get(key)
        if compiled is None:
            compiled = self._thread.submit(key.tenant_id, self._backend.compile, key.spec)
            self._cache.put(key, compiled)
        self.pending[request.request_id] = _Pending(request, compiled)

    def poll(self) -> Iterator[tuple[Request, EngineError | None]]:
        """The requests that wait no longer: with a matcher, or with the error that ends them."""
        for request, compiled in [it for it in self.pending.values() if it.compiled.done()]:
            del self.pending[request.request_id]
            yield request, self._begin(request, compiled)

    def forget(self, request: Request, error: EngineError | None) -> None:
        """The request has ended. A grammar that failed is not used again, and a grammar that no
        request waits for is not compiled."""
        if entry := self.pending.pop(request.request_id, None):
            self._leave(entry)
        if isinstance(error, GrammarFailed):
            self._cache.drop(_key(request))

    def restrict(self, requests: Sequence[Request], logits: Tensor) -> Restricted:
        """See `grammar_masks.restrict`; one of the requests has a grammar."""
        assert self._backend is not None
        return restrict(requests, logits, self._backend.executor, self._backend.vocab_size)

    def close(self) -> None:
        self._thread.close(wait=False)

    def _leave(self, entry: _Pending) -> None:
        is_wanted = any(other.compiled is entry.compiled for other in self.pending.values())
        if not is_wanted and entry.compiled.cancel():
            self._cache.drop(_key(entry.request))

    def _begin(self, request: Request, compiled: Future[Automaton]) -> EngineError | None:
        assert self._backend is not None
        try:
            automaton = compiled.result().deep_copy()
        except Exception as exc:  # the grammar library's error ends this request alone
            self._cache.drop(_key(request))
            if isinstance(exc, EngineError):
                return exc
            logger.exception("the grammar of request %s cannot be compiled", request.request_id)
            return GrammarFailed()
        submitted = request.submitted
        ends = self._backend.end_token_ids.union(submitted.own_end_token_ids)
        request.matcher = Matcher(
            automaton, end_token_ids=ends, ignores_end=submitted.sampling.ignore_eos
        )
        request.end_token_ids |= ends
        return None


def open_grammars(model_dir: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> Grammars:
    """Supported if llguidance is installed and the base has a tokenizer and an end-of-sequence
    token.

    `vocab_size`: of the base's logits. `eos_token_ids`: from the base's configuration.
    """
    return Grammars(_open_backend(model_dir, vocab_size, eos_token_ids))


def _open_backend(
    model_dir: Path, vocab_size: int, eos_token_ids: frozenset[int]
) -> Backend | None:
    if importlib.util.find_spec("llguidance") is None:
        logger.info("grammars are not served: llguidance is not installed")
        return None
    from ..grammars.compiler import GrammarCompiler, make_executor
    from ..grammars.vocabulary import Vocabulary
    from ..text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer(model_dir)
    except EngineError as exc:
        logger.info("grammars are not served: %s", exc)
        return None
    known = eos_token_ids | tokenizer.eos_token_ids
    ends = frozenset(token for token in known if token < vocab_size)
    if not ends:
        logger.info("grammars are not served: the base has no token that ends an output")
        return None
    vocabulary = Vocabulary(tokenizer, vocab_size=vocab_size, end_token_ids=ends)
    return Backend(GrammarCompiler(vocabulary).compile, make_executor(), ends, vocab_size)


def _key(request: Request) -> GrammarKey:
    spec = request.submitted.sampling.grammar
    assert spec is not None
    return GrammarKey(request.tenant_id, spec)
