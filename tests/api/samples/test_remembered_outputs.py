"""The engine drafts from answers that are kept as samples, until the tenant keeps none any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.server import Caller, ServerUnderTest, serving

PROMPT = "The quick brown fox jumps over"


@pytest.fixture(scope="module")
def drafting_server(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    data_dir = tmp_path_factory.mktemp("suffix-server")
    options = ("--served-model-name", "tiny", "--speculation", "suffix")
    with serving(tiny_base, data_dir, *options) as running:
        yield running


def num_accepted(caller: Caller, **body: object) -> int:
    """The tokens of an answer that were drafted correctly; the answer is always the same."""
    answer = caller.http.post(
        "/v1/completions",
        json={
            **{"model": "bot", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5},
            **{"ignore_eos": True, "speculation": {"num_tokens": 5}, **body},
        },
    )
    assert answer.is_success, answer.text
    details = answer.json()["usage"]["completion_tokens_details"]
    accepted: int = details["accepted_prediction_tokens"]
    return accepted


def turn_off(caller: Caller) -> None:
    assert caller.http.delete("/v1/adapters/bot/sampling").is_success


def delete_all(caller: Caller) -> None:
    assert caller.http.delete("/v1/adapters/bot/samples").is_success


def delete_one(caller: Caller) -> None:
    (sample, *_) = caller.http.get("/v1/adapters/bot/samples").json()["data"]
    assert caller.http.delete(f"/v1/adapters/bot/samples/{sample['id']}").is_success


@pytest.mark.slow
@pytest.mark.parametrize("forget", [turn_off, delete_all, delete_one])
def test_answers_are_drafted_from_between_the_opt_in_and_its_end(
    drafting_server: ServerUnderTest, adapters: list[Path], forget: Callable[[Caller], None]
) -> None:
    caller = drafting_server.make_caller(f"outputs-{forget.__name__.replace('_', '-')}")
    caller.push(adapters[0], "bot", aliases=["prod"])
    without = num_accepted(caller)
    assert num_accepted(caller) == without < 10
    share = {"percent": 100, "days": 1}
    assert caller.http.put("/v1/adapters/bot/sampling", json=share).is_success
    num_accepted(caller, store=False)
    assert num_accepted(caller) == without
    assert num_accepted(caller) > 12
    forget(caller)
    assert num_accepted(caller) == without
    assert num_accepted(caller) == without
    caller.close()
