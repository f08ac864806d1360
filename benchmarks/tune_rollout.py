"""How a tenant releases a version: a gate judges it, and a watched canary ends by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.tenant_command import TenantCommand
from benchmarks.tune_task import questions
from openai import OpenAI

ALIAS, GOLDEN_SET = "prod", "held-out"
NUM_QUESTIONS = 200
"""The canary answers about half of them."""
MAX_ANSWER_TOKENS = 128
WATCH_SECONDS = 60.0
LIMITS = ("min_requests=20", "length=1.5")


class Rollout:
    """The alias of an adapter."""

    def __init__(self, command: TenantCommand, client: OpenAI, adapter: str) -> None:
        self._command = command
        self._client = client
        self._adapter = adapter

    def close_gate(self, cases: Path) -> None:
        """Let the alias move only to versions that are no worse on these cases."""
        self._command.succeed("golden-sets", "set", self._adapter, GOLDEN_SET, str(cases))
        self._command.succeed("adapters", "gate", "set", self._adapter, ALIAS, GOLDEN_SET)

    def release(self, version: int) -> str:
        """What the gate did: `passed`, or `refused` because of a regression."""
        result = self._command.run("adapters", "alias", "set", self._adapter, ALIAS, str(version))
        if result.returncode == 0:
            return "passed"
        assert "gate_refused" in result.stderr, result.stderr
        return "refused"

    def try_canary(self, version: int) -> str | None:
        """Send half of the requests to a canary that did not pass the gate; why it ended."""
        limits = [part for limit in LIMITS for part in ("--limit", limit)]
        self._command.succeed(
            *("adapters", "alias", "canary", self._adapter, ALIAS, str(version)),
            *("--percent", "50", *limits, "--override", "to show that it ends by itself"),
        )
        self._ask(questions(NUM_QUESTIONS))
        deadline = time.monotonic() + WATCH_SECONDS
        while (reason := self._reason()) is None and time.monotonic() < deadline:
            time.sleep(1.0)
        return reason

    def _ask(self, prompts: Iterable[str]) -> None:
        for prompt in prompts:
            self._client.chat.completions.create(
                model=f"{self._adapter}@{ALIAS}",
                messages=[{"role": "user", "content": prompt}],
                max_tokens=MAX_ANSWER_TOKENS,
                temperature=0,
            )

    def _reason(self) -> str | None:
        """Of the last change, if it was a canary's end by itself."""
        shown = self._command.succeed(
            "adapters", "alias", "history", self._adapter, ALIAS, "--json"
        )
        last: dict[str, Any] = json.loads(shown)[0]
        reason: str | None = last["reason"]
        return reason
