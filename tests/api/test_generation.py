"""One HTTP request's sequences, with an engine whose events the test controls."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from loraplex.adapters.manager import Tier
from loraplex.api.contract.errors import ApiError
from loraplex.api.inference import generation
from loraplex.api.inference.sequence_text import Delta, SequenceText
from loraplex.api.tools.reasoning import Reasoning
from loraplex.api.tools.reasoning_format import THINK, Beginning
from loraplex.engine.errors import EngineUnavailable, StaleExtent
from loraplex.engine.messages import (
    FinishReason,
    RequestStarted,
    TokensGenerated,
)
from loraplex.engine.text.tokenizer import Tokenizer
from support.scripted_generation import (
    Event,
    Scenario,
    ScriptedStream,
    finished,
    run,
    script,
    started,
)


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


def tokens(tokenizer: Tokenizer, text: str) -> TokensGenerated:
    return TokensGenerated("r", tokenizer.encode(text))


def test_text_and_counts(tokenizer: Tokenizer) -> None:
    events = script(started(2), tokens(tokenizer, "Hel"), tokens(tokenizer, "lo"), finished())
    scenario = Scenario(tokenizer, events)
    assert run(scenario.text()) == ("Hello", "length")
    (outcome,) = scenario.outcomes
    assert outcome.finish_reason == "length"
    assert outcome.tier is Tier.HOST
    counts = outcome.counts
    assert (counts.num_prompt_tokens, counts.num_cached_tokens) == (3, 2)
    assert counts.num_completion_tokens == 5


@pytest.mark.parametrize(
    ("code", "result"),
    [
        (None, "met"),
        ("overloaded", "refused"),
        ("tenant_queue_full", "refused"),
        ("engine_error", "failed"),
        ("invalid_parameter", None),
    ],
)
def test_a_request_counts_by_the_service_level_objective(
    tokenizer: Tokenizer, code: str | None, result: str | None
) -> None:
    answer = script(started(), tokens(tokenizer, "a"), finished())
    scenario = Scenario(tokenizer, [finished(FinishReason.ERROR, code)] if code else answer)
    if code:
        with pytest.raises(ApiError):
            run(scenario.text())
    else:
        run(scenario.text())
    counted = re.findall(
        r'slo_sequences_total{result="(\w+)",set_by="server"} 1', scenario.metrics.render().decode()
    )
    assert counted == ([result] if result else [])


def test_the_prompt_counts_once_however_many_choices_find_it_in_the_cache(
    tokenizer: Tokenizer,
) -> None:
    choices = [script(started(num), tokens(tokenizer, "a"), finished()) for num in (1, 2, 2)]
    scenario = Scenario(tokenizer, *choices)
    run(scenario.text())
    counts = scenario.outcomes[0].counts
    assert (counts.num_prompt_tokens, counts.num_cached_tokens) == (3, 1)


def test_the_token_that_ends_the_output_is_paid_and_not_shown(tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.eos_token_ids
    end = TokensGenerated("r", [eos])
    events = script(started(), tokens(tokenizer, "Hi"), end, finished(FinishReason.STOP))
    scenario = Scenario(tokenizer, events, stop_token_ids=(eos,))
    assert run(scenario.text()) == ("Hi", "stop")
    assert scenario.outcomes[0].counts.num_completion_tokens == 3


def test_an_ordinary_token_may_be_a_stop_token(tokenizer: Tokenizer) -> None:
    stop_token = tokenizer.encode("!")
    events = script(started(), tokens(tokenizer, "Hi!"), finished(FinishReason.STOP))
    scenario = Scenario(tokenizer, events, stop_token_ids=tuple(stop_token))
    assert run(scenario.text()) == ("Hi", "stop")


def test_a_stop_string_ends_the_request_in_the_engine(tokenizer: Tokenizer) -> None:
    events = script(started(), tokens(tokenizer, "one, tw"), tokens(tokenizer, "o, three"))
    scenario = Scenario(tokenizer, events, stop=("two",))
    assert run(scenario.text()) == ("one, ", "stop")
    assert scenario.engine.closed == ["r-0"]
    assert scenario.outcomes[0].counts.num_completion_tokens == len("one, two")


def test_a_stop_string_inside_of_an_event_ends_the_output_right_there(tokenizer: Tokenizer) -> None:
    drafted = TokensGenerated("r", tokenizer.encode("two, three"), num_draft_tokens=12)
    scenario = Scenario(tokenizer, script(started(), tokens(tokenizer, "1"), drafted), stop=("tw",))
    assert run(scenario.text()) == ("1", "stop")
    counts = scenario.outcomes[0].counts
    assert counts.num_completion_tokens == len("1tw")
    assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (12, 1)


def test_drafts_are_counted_over_all_choices(tokenizer: Tokenizer) -> None:
    def choice(text: str, num_drafted: int) -> list[Event]:
        drafted = TokensGenerated("r", tokenizer.encode(text), num_draft_tokens=num_drafted)
        return script(started(), tokens(tokenizer, "a"), drafted, finished())

    scenario = Scenario(tokenizer, choice("bcd", 4), choice("e", 3))
    run(scenario.text())
    counts = scenario.outcomes[0].counts
    assert counts.num_completion_tokens == 6
    assert (counts.num_draft_tokens, counts.num_accepted_tokens) == (7, 2)


def test_tokens_that_come_together_have_no_gap_and_share_their_time(tokenizer: Tokenizer) -> None:
    drafted = [tokens(tokenizer, text) for text in ("a", "bcd", "ef!gone")]
    scenario = Scenario(tokenizer, script(started(), *drafted), stop=("!",))
    run(scenario.text())
    said = scenario.metrics.render().decode()
    assert "loraplex_inter_token_latency_seconds_count 2.0" in said
    gaps, per_token = (
        float(re.findall(rf"loraplex_{name}_seconds_sum (\S+)", said)[0])
        for name in ("inter_token_latency", "time_per_output_token")
    )
    assert per_token == pytest.approx(gaps / (len("abcdef!") - 1))


def test_what_was_held_back_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    events = script(started(), tokens(tokenizer, "one, tw"), finished())
    scenario = Scenario(tokenizer, events, stop=("two",))
    assert run(scenario.text()) == ("one, tw", "length")


def test_it_is_metered_before_the_last_delta_and_only_once(tokenizer: Tokenizer) -> None:
    scripts = [script(started(), tokens(tokenizer, "a"), finished())] * 2
    scenario = Scenario(tokenizer, *scripts)

    async def follow() -> list[tuple[Delta, int]]:
        await scenario.start()
        seen = [
            (delta, len(scenario.outcomes))
            async for deltas in scenario.generation.deltas()
            for delta in deltas
        ]
        await scenario.generation.aclose()
        return seen

    seen = run(follow())
    numbers = {delta.finish_reason: number for delta, number in seen[:-1]}
    assert numbers[None] == 0
    assert seen[-1][1] == 1
    assert len(scenario.outcomes) == 1
    counts = scenario.outcomes[0].counts
    assert (counts.num_prompt_tokens, counts.num_completion_tokens) == (3, 2)


def test_an_answer_that_cannot_be_metered_is_not_finished(tokenizer: Tokenizer) -> None:
    scenario = Scenario(tokenizer, script(started(), tokens(tokenizer, "a"), finished()))
    scenario.fails_to_meter = True
    with pytest.raises(ApiError) as failure:
        run(scenario.text())
    assert failure.value.code == "database_unavailable"


@pytest.mark.parametrize("code", ["context_length_exceeded", "engine_unavailable"])
def test_a_refusal_by_the_engine_is_raised_at_the_start(tokenizer: Tokenizer, code: str) -> None:
    scenario = Scenario(tokenizer, [finished(FinishReason.ERROR, code)])

    async def begin() -> None:
        try:
            await scenario.start()
        finally:
            await scenario.generation.aclose()

    with pytest.raises(ApiError) as failure:
        run(begin())
    assert failure.value.code == code
    assert scenario.charged == [("aborted", 0, 0)]


def test_an_error_on_the_way_is_raised_and_what_was_generated_is_metered(
    tokenizer: Tokenizer,
) -> None:
    broken = finished(FinishReason.ERROR, "engine_restarted")
    failing = script(started(), tokens(tokenizer, "ab"), broken)
    scenario = Scenario(tokenizer, failing, script(started(), tokens(tokenizer, "c")))

    async def follow() -> None:
        await scenario.start()
        try:
            async for _ in scenario.generation.deltas():
                pass
        finally:
            await scenario.generation.aclose()

    with pytest.raises(ApiError) as failure:
        run(follow())
    assert failure.value.code == "engine_restarted"
    assert sorted(scenario.engine.closed) == ["r-0", "r-1"]
    (outcome,) = scenario.outcomes
    assert outcome.finish_reason == "aborted"
    assert outcome.counts.num_completion_tokens == 3


def test_a_caller_does_not_wait_for_ever_for_an_adapter(tokenizer: Tokenizer) -> None:
    scenario = Scenario(tokenizer, [])

    async def begin() -> None:
        try:
            await scenario.start(is_loading=True)
        finally:
            await scenario.generation.aclose()

    with pytest.raises(ApiError) as failure:
        run(begin())
    assert failure.value.code == "adapter_loading"
    assert scenario.engine.closed == ["r-0"]


def test_a_caller_waits_for_its_turn_if_the_adapter_is_there(tokenizer: Tokenizer) -> None:
    scenario = Scenario(tokenizer, [started(), finished()])
    scenario.engine.may_play.clear()
    num_questions = 0

    def is_loading() -> bool:
        nonlocal num_questions
        num_questions += 1
        if num_questions == 3:
            scenario.engine.may_play.set()
        return False

    async def begin() -> RequestStarted:
        return await scenario.generation.start(is_loading=is_loading, patience_seconds=0.001)

    assert run(begin()) == started()
    assert num_questions >= 3


def test_closing_before_anything_started_gives_the_account_back_once(tokenizer: Tokenizer) -> None:
    scenario = Scenario(tokenizer, [])

    async def close() -> None:
        task = asyncio.create_task(scenario.start())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scenario.generation.aclose()
        await scenario.generation.aclose()

    run(close())
    assert scenario.charged == [("aborted", 0, 0)]


def test_a_stop_string_ends_the_request_even_if_nobody_reads(tokenizer: Tokenizer) -> None:
    events = script(started(), tokens(tokenizer, "one, tw"), tokens(tokenizer, "o, three"))
    scenario = Scenario(tokenizer, events, stop=("two",))

    async def begin() -> None:
        await scenario.start()
        while not scenario.engine.closed:
            await asyncio.sleep(0)

    run(asyncio.wait_for(begin(), timeout=30))
    assert scenario.engine.closed == ["r-0"]


def test_what_waited_for_a_slow_reader_is_told_at_once(tokenizer: Tokenizer) -> None:
    pieces = [tokens(tokenizer, letter) for letter in "abcdefgh"]
    scenario = Scenario(tokenizer, script(started(), *pieces, finished()))

    async def read_late() -> list[list[Delta]]:
        await scenario.start()
        while not scenario.engine.closed:
            await asyncio.sleep(0)
        return [deltas async for deltas in scenario.generation.deltas()]

    ((delta,),) = run(asyncio.wait_for(read_late(), timeout=30))
    assert (delta.text, delta.finish_reason) == ("abcdefgh", "length")
    assert scenario.outcomes[0].counts.num_completion_tokens == len("abcdefgh")


def test_who_takes_text_at_once_is_not_given_it_again(tokenizer: Tokenizer) -> None:
    pieces = [tokens(tokenizer, letter) for letter in "one, two, three"]
    scenario = Scenario(tokenizer, script(started(), *pieces), stop=(" three",))
    at_once: list[Delta] = []

    def take(delta: Delta) -> bool:
        at_once.append(delta)
        return True

    async def read() -> list[Delta]:
        await scenario.start()
        return [delta async for deltas in scenario.generation.deltas(take) for delta in deltas]

    (end,) = run(asyncio.wait_for(read(), timeout=30))
    assert "".join(delta.text for delta in at_once) + end.text == "one, two,"
    assert len(at_once) > len("one, two,") - 2
    assert end.finish_reason == "stop"
    assert scenario.charged == [("stop", 3, len(pieces))]


def test_who_cannot_take_text_at_once_is_told_and_nothing_runs_on(tokenizer: Tokenizer) -> None:
    hanging = script(started(), tokens(tokenizer, "a"), tokens(tokenizer, "b"))
    scenario = Scenario(tokenizer, hanging, script(started()))

    def take(_: Delta) -> bool:
        raise ValueError("planted")

    async def read() -> None:
        await scenario.start()
        try:
            async for _ in scenario.generation.deltas(take):
                pass
        finally:
            await scenario.generation.aclose()

    with pytest.raises(ValueError, match="planted"):
        run(asyncio.wait_for(read(), timeout=30))
    assert sorted(scenario.engine.closed) == ["r-0", "r-1"]
    assert [reason for reason, *_ in scenario.charged] == ["aborted"]


def test_no_more_sequences_are_open_than_may_be_and_all_get_their_turn(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_OPEN_SEQUENCES", 3)
    scripts = [script(started(), tokens(tokenizer, str(n)), finished()) for n in range(8)]
    scenario = Scenario(tokenizer, *scripts)
    num_open = []
    submit = scenario.engine.submit

    def count(*arguments: Any) -> ScriptedStream:
        stream = submit(*arguments)
        num_open.append(8 - len(scenario.engine.scripts) - len(scenario.engine.closed))
        return stream

    scenario.engine.submit = count  # type: ignore[assignment, method-assign]

    async def answer() -> list[list[Delta]]:
        await scenario.start()
        return await scenario.generation.whole()

    choices = run(asyncio.wait_for(answer(), timeout=30))
    assert ["".join(d.text for d in deltas) for deltas in choices] == list("01234567")
    assert num_open[:3] == [1, 2, 3]
    assert max(num_open) == 3
    assert sorted(scenario.engine.closed) == sorted(f"r-{n}" for n in range(8))


def test_a_later_sequence_that_cannot_begin_fails_its_caller_and_nobody_else(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_OPEN_SEQUENCES", 1)
    scenario = Scenario(tokenizer, script(started(), tokens(tokenizer, "a"), finished()), [])

    class Failing(SequenceText):
        def __init__(self, index: int, *given: Any, **named: Any) -> None:
            if index == 1:
                raise ValueError("planted")
            super().__init__(index, *given, **named)

    monkeypatch.setattr(generation, "SequenceText", Failing)
    raised: list[object] = []

    async def answer() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: raised.append(what))
        await scenario.start()
        try:
            await scenario.generation.whole()
        finally:
            await scenario.generation.aclose()

    with pytest.raises(ValueError, match="planted"):
        run(asyncio.wait_for(answer(), timeout=30))
    gc.collect()
    assert raised == [], "whoever gives an event must not hear of it"
    assert scenario.charged == [("aborted", 3, 1)]


def test_an_engine_that_refuses_to_take_it_is_raised_at_the_start(tokenizer: Tokenizer) -> None:
    scenario = Scenario(tokenizer, [], [])

    def refuse(*_: Any) -> ScriptedStream:
        raise EngineUnavailable

    scenario.engine.submit = refuse  # type: ignore[assignment, method-assign]

    async def begin() -> None:
        try:
            await scenario.start()
        finally:
            await scenario.generation.aclose()

    with pytest.raises(EngineUnavailable):
        run(begin())
    assert scenario.charged == [("aborted", 0, 0)]


def test_an_error_with_an_unpublished_code_ends_its_request(tokenizer: Tokenizer) -> None:
    scenario = Scenario(tokenizer, [])
    scenario.engine.submit = Mock(side_effect=StaleExtent)  # type: ignore[method-assign]
    with pytest.raises(StaleExtent):
        run(scenario.text())
    counted = re.findall(r'slo_sequences_total{result="(\w+)"', scenario.metrics.render().decode())
    assert counted == ["failed"]


def test_an_ended_request_is_freed_without_looking_for_garbage(tokenizer: Tokenizer) -> None:
    events = script(started(), tokens(tokenizer, "Hi"), finished())
    scenario = Scenario(tokenizer, events)
    gc.disable()
    try:
        run(scenario.text())
        ended = weakref.ref(scenario.generation)
        del scenario.generation
        assert ended() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize("stop", [(), ("never",), ("</think>!",), ("Yes",)])
@pytest.mark.parametrize(
    ("beginning", "output", "num_reasoning"),
    [
        (Beginning.EITHER, "<think>Hm.</think>Yes.", len("<think>Hm.</think>")),
        (Beginning.EITHER, "\n<think></think>", len("\n<think></think>")),
        (Beginning.EITHER, "No <think>.</think>", 0),
        (Beginning.EITHER, "<thi", 0),
        (
            Beginning.REASONING,
            "Hm. \u00fc</think>Yes",
            len("Hm. \u00fc".encode()) + len("</think>"),
        ),
        (Beginning.REASONING, "Hm. </think", len("Hm. </think")),
        (Beginning.ANSWER, "Hm.</think>Yes", 0),
    ],
)
def test_the_tokens_of_the_reasoning_are_counted_to_the_token(
    tokenizer: Tokenizer,
    size: int,
    stop: tuple[str, ...],
    beginning: Beginning,
    output: str,
    num_reasoning: int,
) -> None:
    """The tokenizer has one token per byte. Steps with draft tokens give several at once."""
    ids = tokenizer.encode(output)
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    eos = min(tokenizer.eos_token_ids)
    events: list[Event] = [started(), *(TokensGenerated("r", piece) for piece in pieces)]
    events += [TokensGenerated("r", [eos]), finished(FinishReason.STOP)]
    scenario = Scenario(
        tokenizer,
        script(*events),
        script(*events),
        stop=stop,
        stop_token_ids=(eos,),
        reasoning=Reasoning(THINK, beginning),
    )
    run(scenario.deltas())
    counts = scenario.generation.counts
    assert counts.num_reasoning_tokens == 2 * num_reasoning, "over both choices"
    assert counts.num_completion_tokens >= counts.num_reasoning_tokens


def test_a_stop_string_ends_the_reasoning_too(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hm, so. More</think>Yes")
    scenario = Scenario(
        tokenizer,
        script(started(), TokensGenerated("r", ids), finished()),
        stop=("so",),
        reasoning=Reasoning(THINK, Beginning.REASONING),
    )
    assert run(scenario.text()) == ("Hm, ", "stop")
    counts = scenario.generation.counts
    assert counts.num_completion_tokens == counts.num_reasoning_tokens == len("Hm, so")
