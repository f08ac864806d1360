"""Compiles grammars in a separate process before the engine sees them.

An invalid grammar gets a 400 response. A harmful one ends only that process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from weakref import WeakValueDictionary

from ...engine.errors import EngineUnavailable, InvalidGrammar
from ...engine.grammars.cache import GrammarCache, GrammarKey
from ...engine.grammars.check_process import REFUSED_SIGNALS, TOO_COSTLY, introduction, question
from ...engine.grammars.spec import GrammarSpec
from ...engine.text.tokenizer import Tokenizer

# -P: the working directory is no place to import from.
CHECK_COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.grammars.check_process")
WALL_SECONDS = 60.0
"""The wait for an answer on a busy machine; the process itself limits its CPU time."""
DYING_SECONDS = 10.0
"""How long a process whose output has ended may take to exit."""
CACHE_BYTES = 1 << 30
"""As the cache counts; no compiled grammars are held here, so it is some thousand answers."""


class GrammarChecks:
    """Asks one process, which is started when it is first needed and again when it has died.

    A tenant has one grammar in it at a time, so that the others wait no longer than for one of
    each.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: Callable[[], int],
        *,
        command: Sequence[str] = CHECK_COMMAND,
    ) -> None:
        """`vocab_size`: the model's, once the engine is ready."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._command = command
        self._answers: GrammarCache[asyncio.Task[str | None]] = GrammarCache(CACHE_BYTES)
        self._tenant_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    async def check(self, tenant_id: str, spec: GrammarSpec) -> None:
        """Raises InvalidGrammar, or EngineUnavailable if it could not be found out."""
        key = GrammarKey(tenant_id, spec)
        answer = self._answers.get(key)
        if answer is None or _has_failed(answer):
            # In a separate context, because the answer is kept longer than the request.
            answer = asyncio.create_task(self._ask_in_order(key), context=Context())
            self._answers.put(key, answer)
        refusal = await asyncio.shield(answer)
        if refusal is not None:
            raise InvalidGrammar(refusal)

    async def aclose(self) -> None:
        """End the process."""
        await self._end()

    async def _ask_in_order(self, key: GrammarKey) -> str | None:
        tenant_lock = self._tenant_locks.setdefault(key.tenant_id, asyncio.Lock())
        async with tenant_lock, self._lock:
            return await self._ask(key.spec)

    async def _ask(self, spec: GrammarSpec) -> str | None:
        """Why the grammar is refused; None: it is not."""
        was_used = self._process is not None
        try:
            async with asyncio.timeout(WALL_SECONDS):
                line = await self._exchange(question(spec))
        except (TimeoutError, OSError) as exc:
            await self._end()
            raise EngineUnavailable("the grammar could not be checked") from exc
        if line:
            refusal: str | None = json.loads(line)
            return refusal
        cause = await self._end(is_dying=True)
        if was_used:  # memory held for earlier grammars may be the cause: try a new process
            return await self._ask(spec)
        if cause in REFUSED_SIGNALS:
            return TOO_COSTLY
        raise EngineUnavailable("the grammar could not be checked")

    async def _exchange(self, message: bytes) -> bytes:
        """The line that answers; empty if the process died of it."""
        if self._process is not None and _was_killed(self._process):
            await self._end()
        process = self._process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(message)
        with suppress(ConnectionError):
            await process.stdin.drain()
        return await process.stdout.readline()

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, env=_environment()
        )
        assert process.stdin is not None
        process.stdin.write(self._introduction())
        return process

    def _introduction(self) -> bytes:
        vocab_size = self._vocab_size()
        name_of = self._tokenizer.backend.id_to_token
        ends = self._tokenizer.eos_token_ids
        special = self._tokenizer.special_token_ids | ends
        names = {token: name_of(token) or "" for token in special if token < vocab_size}
        return introduction(vocab_size, names, min(ends, default=0))

    async def _end(self, *, is_dying: bool = False) -> int | None:
        """End the process; returns the signal that it died of, if any.

        `is_dying`: its output has ended, so it exits soon. Killing it could hide the cause: by a
        second signal, or by reaping it before its waiter does.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        if is_dying:
            with suppress(TimeoutError):
                async with asyncio.timeout(DYING_SECONDS):
                    return -await process.wait()
        with suppress(ProcessLookupError):
            process.kill()
        return -await process.wait()


def _was_killed(process: Process) -> bool:
    """Whether it died while idle; writing to it would raise."""
    assert process.stdin is not None
    return process.returncode is not None or process.stdin.is_closing()


def _has_failed(answer: asyncio.Task[str | None]) -> bool:
    """Whether the check did not complete, for example because all callers disconnected."""
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


def _environment() -> Mapping[str, str]:
    """The import path, and nothing of the server's own environment."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
