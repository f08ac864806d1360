"""Deltas that wait for a caller that is slower than the engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.inference.arrivals import MAX_PIECES, Arrivals
from loraplex.api.inference.sequence_text import Delta
from loraplex.engine.messages import RequestStarted, TokenLogprob, TokenLogprobs


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=30))


def test_who_keeps_up_gets_each_delta_by_itself() -> None:
    async def scenario() -> None:
        arrivals = Arrivals()

        async def take() -> list[list[Delta]]:
            return [await arrivals.next() for _ in range(3)]

        taking = asyncio.create_task(take())
        for text in "abc":
            await asyncio.sleep(0)
            arrivals.add(Delta(0, text, []))
            await asyncio.sleep(0)
        assert [[delta.text for delta in taken] for taken in await taking] == [["a"], ["b"], ["c"]]

    run(scenario())


@pytest.mark.parametrize("num_deltas", [1, 2, MAX_PIECES, 10 * MAX_PIECES + 3])
def test_text_that_waited_is_one_delta_a_choice_and_all_there(num_deltas: int) -> None:
    async def scenario() -> None:
        arrivals, rng = Arrivals(), random.Random(num_deltas)
        texts = {0: "", 1: ""}
        for number in range(num_deltas):
            index = rng.randrange(2) if number else 0
            texts[index] += str(number)
            arrivals.add(Delta(index, str(number), []))
        arrivals.add(Delta(0, "!", [], "length"))
        taken = await arrivals.next()
        assert {delta.index: delta.text for delta in taken} == {
            index: text + "!" * (index == 0) for index, text in texts.items() if text
        }
        assert [delta.finish_reason for delta in taken if delta.index == 0] == ["length"]
        assert len(taken) == sum(map(bool, texts.values()))

    run(scenario())


def test_log_probabilities_stay_with_their_text() -> None:
    async def scenario() -> None:
        arrivals = Arrivals()
        said = [
            Delta(0, str(number), [TokenLogprobs(TokenLogprob(number, -1.0), [])])
            for number in range(3 * MAX_PIECES)
        ]
        for delta in said:
            arrivals.add(delta)
        assert await arrivals.next() == said

    run(scenario())


def test_what_came_before_a_failure_is_given_and_nothing_behind_it() -> None:
    async def scenario() -> None:
        arrivals = Arrivals()
        arrivals.add(Delta(0, "a", []))
        arrivals.fail(ApiError("request_cancelled"))
        arrivals.fail(ApiError("internal_error"))
        arrivals.add(Delta(0, "b", []))
        assert [delta.text for delta in await arrivals.next()] == ["a"]
        for waiting in (arrivals.next(), arrivals.all(), arrivals.first()):
            with pytest.raises(ApiError) as failure:
                await waiting
            assert failure.value.code == "request_cancelled"

    run(scenario())


def test_who_gave_up_waiting_once_loses_nothing() -> None:
    async def scenario() -> None:
        arrivals = Arrivals()
        for waiting in (arrivals.first(), arrivals.next()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, timeout=0.001)
        started = RequestStarted("r", 0.0, 0.0, None, 0)
        arrivals.start(started)
        arrivals.start(RequestStarted("later", 0.0, 0.0, None, 0))
        arrivals.add(Delta(0, "a", []))
        assert await arrivals.first() == started
        assert [delta.text for delta in await arrivals.next()] == ["a"]

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_what_is_taken_at_once_and_what_waits_is_everything_in_order(seed: int) -> None:
    async def scenario() -> None:
        arrivals, rng = Arrivals(), random.Random(seed)
        given, num_taken_at_once, is_over = "", 0, False

        def offer(delta: Delta) -> bool:
            nonlocal given, num_taken_at_once
            assert delta.finish_reason is None
            if rng.random() < 0.5:
                return False
            given += delta.text
            num_taken_at_once += 1
            return True

        async def take() -> None:
            nonlocal given, is_over
            while not is_over:
                for delta in await arrivals.next(offer):
                    given += delta.text
                    is_over = delta.finish_reason is not None
                for _ in range(rng.randrange(4)):  # as if sending took a while
                    await asyncio.sleep(0)

        taking = asyncio.create_task(take())
        said = [f"{number}," for number in range(300)]
        for text in said:
            arrivals.add(Delta(0, text, []))
            if rng.random() < 0.7:
                await asyncio.sleep(0)
        arrivals.add(Delta(0, "end", [], "stop"))
        await taking
        assert given == "".join(said) + "end"
        assert 0 < num_taken_at_once < len(said)

    run(scenario())


def test_nothing_is_offered_to_who_does_not_wait() -> None:
    async def scenario() -> None:
        arrivals = Arrivals()
        offered: list[str] = []

        def offer(delta: Delta) -> bool:
            offered.append(delta.text)
            return True

        taking = asyncio.create_task(arrivals.next(offer))
        await asyncio.sleep(0)
        arrivals.add(Delta(0, "a", []))
        arrivals.add(Delta(0, "b", [], "stop"))
        arrivals.add(Delta(1, "c", []))  # behind what has woken the taker
        assert [delta.text for delta in await taking] == ["b", "c"]
        arrivals.add(Delta(1, "d", []))
        assert [delta.text for delta in await arrivals.next(offer)] == ["d"]
        assert offered == ["a"]

    run(scenario())


def test_everything_is_given_by_choice_once_it_has_come() -> None:
    async def scenario() -> None:
        arrivals = Arrivals()
        waiting = asyncio.create_task(arrivals.all())
        for index, text in [(1, "x"), (0, "a"), (1, "y")]:
            arrivals.add(Delta(index, text, []))
            await asyncio.sleep(0)
            assert not waiting.done()
        arrivals.end()
        by_choice = await waiting
        assert {index: "".join(d.text for d in deltas) for index, deltas in by_choice.items()} == {
            0: "a",
            1: "xy",
        }

    run(scenario())
