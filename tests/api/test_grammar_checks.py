"""Grammars are compiled in a separate process before the engine sees them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from loraplex.api.inference.grammar_checks import CHECK_COMMAND, GrammarChecks
from loraplex.api.inference.inference import Inference
from loraplex.api.inference.order import Order
from loraplex.api.inference.served_models import ServedModel
from loraplex.engine.errors import EngineUnavailable, GrammarNotServed, InvalidGrammar
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.messages import NO_TARGETS
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.text_form import TextForm
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.tenants.slo import NO_SLO
from support.grammars import needs_llguidance

GOOD = GrammarSpec(GrammarKind.REGEX, "a+")
BAD = GrammarSpec(GrammarKind.REGEX, "(a")
COSTLY = GrammarSpec(GrammarKind.LARK, 'start: %json {"type": "integer", "multipleOf": 999983}')
"""It takes the library some 8 s and 390 MB."""


def count_of(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def scripted(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A process that notes each of its lives in `lives`, reads the introduction, and then does
    this."""
    log = tmp_path / "lives"
    program = (
        "import os, signal, sys, time\n"
        f"open({str(log)!r}, 'a').write('life\\n')\n"
        "sys.stdin.readline()\n"
        f"{body}\n"
    )
    return (sys.executable, "-c", program)


def with_checks(
    tokenizer: Tokenizer,
    run: Callable[[GrammarChecks], Awaitable[None]],
    command: tuple[str, ...] = CHECK_COMMAND,
) -> None:
    async def main() -> None:
        checks = GrammarChecks(tokenizer, lambda: tokenizer.vocab_size, command=command)
        try:
            await run(checks)
        finally:
            await checks.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server has it
        runner.run(main())


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


@needs_llguidance
def test_a_wrong_or_harmful_grammar_is_refused_and_the_next_is_not(tokenizer: Tokenizer) -> None:
    async def run(checks: GrammarChecks) -> None:
        with pytest.raises(InvalidGrammar, match="more time or memory"):
            await checks.check("acme", COSTLY)
        await checks.check("acme", GOOD)
        with pytest.raises(InvalidGrammar, match="unclosed group"):
            await checks.check("acme", BAD)
        await checks.check("acme", GrammarSpec(GrammarKind.LARK, 'start: <|user|> "a"'))
        with pytest.raises(InvalidGrammar, match="unknown special token"):
            await checks.check("acme", GrammarSpec(GrammarKind.LARK, 'start: <|nobody|> "a"'))
        await checks.check("acme", GrammarSpec(GrammarKind.CHOICE, '["a"]'))

    with_checks(tokenizer, run)


ANSWERS = "for line in sys.stdin: print('null', flush=True)"


def test_a_tenants_grammar_is_asked_for_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    log = tmp_path / "asked"
    command = scripted(
        tmp_path,
        f"for line in sys.stdin: open({str(log)!r}, 'a').write(line); print('null', flush=True)",
    )

    async def run(checks: GrammarChecks) -> None:
        await asyncio.gather(*(checks.check("acme", GOOD) for _ in range(5)))
        await checks.check("acme", GOOD)
        assert count_of(log) == 1
        await checks.check("other", GOOD)
        assert count_of(log) == 2

    with_checks(tokenizer, run, command)


@pytest.mark.parametrize("name", ["SIGPROF", "SIGABRT", "SIGSEGV"])
def test_a_grammar_that_the_process_dies_of_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    command = scripted(tmp_path, f"sys.stdin.readline(); os.kill(os.getpid(), signal.{name})")

    async def run(checks: GrammarChecks) -> None:
        for _ in range(2):
            with pytest.raises(InvalidGrammar, match="more time or memory"):
                await checks.check("acme", GOOD)
        assert count_of(tmp_path / "lives") == 1

    with_checks(tokenizer, run, command)


def test_a_grammar_that_others_left_no_room_for_is_asked_again(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    command = scripted(
        tmp_path,
        "sys.stdin.readline(); print('null', flush=True)\n"
        "sys.stdin.readline(); os.kill(os.getpid(), signal.SIGABRT)",
    )

    async def run(checks: GrammarChecks) -> None:
        await checks.check("acme", GOOD)
        await checks.check("acme", BAD)
        assert count_of(tmp_path / "lives") == 2

    with_checks(tokenizer, run, command)


def test_a_process_that_was_killed_while_idle_is_started_again(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    answer_each = "for _ in sys.stdin: print('null', flush=True)"

    async def run(checks: GrammarChecks) -> None:
        await checks.check("acme", GOOD)
        process = checks._process
        assert process is not None
        process.kill()
        await process.wait()
        for number in range(3):
            await checks.check("acme", GrammarSpec(GrammarKind.REGEX, f"a{{{number + 1}}}"))

    with_checks(tokenizer, run, scripted(tmp_path, answer_each))
    assert count_of(tmp_path / "lives") == 2


def test_a_process_that_takes_its_time_to_die_refuses_the_grammar(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    command = scripted(
        tmp_path,
        "sys.stdin.readline(); os.close(1); time.sleep(0.2); os.kill(os.getpid(), signal.SIGABRT)",
    )

    async def run(checks: GrammarChecks) -> None:
        with pytest.raises(InvalidGrammar, match="more time or memory"):
            await checks.check("acme", GOOD)

    with_checks(tokenizer, run, command)


def test_a_process_that_dies_of_something_else_refuses_nothing(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    command = scripted(tmp_path, "sys.stdin.readline(); sys.exit(3)")

    async def run(checks: GrammarChecks) -> None:
        for _ in range(2):
            with pytest.raises(EngineUnavailable):
                await checks.check("acme", GOOD)
        assert count_of(tmp_path / "lives") == 2

    with_checks(tokenizer, run, command)


def test_a_caller_who_goes_away_takes_no_answer_with_him(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async def run(checks: GrammarChecks) -> None:
        first = asyncio.create_task(checks.check("acme", GOOD))
        second = asyncio.create_task(checks.check("acme", GOOD))
        await asyncio.sleep(0)
        first.cancel()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first

    with_checks(tokenizer, run, scripted(tmp_path, ANSWERS))


def test_what_failed_when_nobody_waited_any_more_is_asked_again(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    log = tmp_path / "lives"
    command = scripted(
        tmp_path,
        "sys.stdin.readline()\n"
        f"if len(open({str(log)!r}).readlines()) == 1: sys.exit(3)\n"
        "print('null', flush=True); sys.stdin.readline()",
    )

    async def run(checks: GrammarChecks) -> None:
        gone = asyncio.create_task(checks.check("acme", GOOD))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        while asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.sleep(0.01)  # what was begun for it comes to its end
        await checks.check("acme", GOOD)
        assert count_of(log) == 2

    with_checks(tokenizer, run, command)


def test_a_server_without_grammars_says_so() -> None:
    tokenizer = SimpleNamespace(
        eos_token_ids=frozenset(), render_chat=lambda *_, **__: "", chat_template_text=""
    )
    nothing = cast(Any, tokenizer)
    engine = SimpleNamespace(
        info=SimpleNamespace(
            vocab_size=10,
            proposers=[],
            serves_grammars=False,
            kv_policy_obstacle=None,
            latency_targets=NO_TARGETS,
            endless_obstacle=None,
        )
    )
    inference = Inference(
        engine=cast(Any, engine),
        tokenizer=nothing,
        version_tokenizers=nothing,
        control_plane=nothing,
        metering=nothing,
        seen_adapters=nothing,
        admission=nothing,
        metrics=nothing,
        live_answers=nothing,
        served_model_name="base",
        adapter_wait_seconds=1.0,
        samples=nothing,
    )
    order = Order(
        request_id="r",
        arrived_at=0.0,
        principal=cast(Any, SimpleNamespace(tenant_id="acme", tenant_slo=NO_SLO)),
        model=ServedModel("base", None),
        prompts=[[1]],
        num_choices=1,
        sampling=SamplingParams(grammar=GOOD),
        text=TextForm(continues_prompt=True),
    )

    async def start() -> None:
        try:
            await inference.start(order)
        finally:
            await inference.aclose()

    with pytest.raises(GrammarNotServed):
        asyncio.run(start())
