"""What the benchmark of speculation asks for, and who guesses."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from benchmarks.speculation_arms import Job
from torch import Tensor

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import ADAPTER_STYLES, Style, held_out_requests
from loraplex.engine.request import Request
from loraplex.engine.speculation.draft import Draft
from loraplex.engine.speculation.proposer import Wanted
from loraplex.engine.speculation.proposers import OPENERS
from loraplex.engine.tokenizer import Tokenizer

BASE = WEIGHTS / "base"
ADAPTERS = {style.value: WEIGHTS / style for style in ADAPTER_STYLES}
CONFIGURATIONS = {"ngram": "ngram"}
"""By name what the demo engine's configuration says of each proposer."""


def known_proposers() -> dict[str, str]:
    """The configured ones that this engine can open."""
    return {name: entry for name, entry in CONFIGURATIONS.items() if name in OPENERS}


def demo_work() -> dict[str, list[Job]]:
    """The demo's held-out questions by who answers: the base, which repeats them, and the adapters,
    which put them in other words."""
    tokenizer = Tokenizer(BASE)
    chats = ([{"role": "user", "content": request.prompt}] for request in held_out_requests())
    prompts = [tokenizer.encode_chat(chat) for chat in chats]
    return {
        Style.ECHO.value: [Job(prompt) for prompt in prompts],
        **{name: [Job(prompt, name) for prompt in prompts] for name in ADAPTERS},
    }


class NeverRight:
    """Guesses at random: next to nothing of it holds, and it is as fast as guessing can be."""

    name = "never_right"
    needs_hidden_states = False

    def __init__(self, vocab_size: int) -> None:
        self.num_tokens: int | None = None
        """Guesses for each request; None: as many as are wanted."""
        self._rng = Random(0)
        self._vocab_size = vocab_size

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        return [
            self._guess(num_tokens if self.num_tokens is None else self.num_tokens)
            for _, num_tokens in wanted
        ]

    def _guess(self, num_tokens: int) -> Draft:
        return Draft(tuple(self._rng.randrange(self._vocab_size) for _ in range(num_tokens)))

    def observe(self, request: Request, hidden_state: Tensor | None) -> None:
        """Nothing would teach it."""

    def forget(self, request_id: str) -> None:
        """It knows nobody."""
