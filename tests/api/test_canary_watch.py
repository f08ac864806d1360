"""What the requests of a split alias say about their versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from loraplex.api.contract.error_codes import ERROR_CODES
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.telemetry.canary_watch import CODES_OF_SERVERS, CanaryWatch, observe
from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.telemetry.request_measures import CLIENT_DISCONNECTED, RequestMeasures
from loraplex.api.tools.reasoning import Reasoning
from loraplex.api.tools.reasoning_format import THINK, Beginning
from loraplex.engine.messages import FinishReason, TokensGenerated
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.adapters.canary_sums import Arm, Observation, Split
from loraplex.platform.errors import DatabaseUnavailable
from support.scripted_generation import Scenario, finished, run, script, started

ARM = Arm(Split("acme", "adapter", "bot", "prod", 1), is_canary=True)


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


@pytest.mark.parametrize("code", sorted(ERROR_CODES))
def test_errors_count_that_are_neither_the_callers_nor_the_whole_servers(code: str) -> None:
    of_the_version = {"numerical_error", "adapter_quarantined", "adapter_too_large"}
    is_counted = ERROR_CODES[code].status >= 500 and code not in CODES_OF_SERVERS
    expected = Observation(is_error=True) if is_counted or code in of_the_version else None
    assert observe(code, RequestMeasures()) == expected


def test_a_disconnected_caller_says_nothing() -> None:
    assert observe(CLIENT_DISCONNECTED, RequestMeasures()) is None


def test_an_answer_counts_with_its_tokens() -> None:
    measures = RequestMeasures(completion_tokens=7, is_refusal=False, token_seconds=0.5)
    assert observe("", measures) == Observation(is_refusal=False, num_tokens=7, token_seconds=0.5)


@pytest.mark.parametrize(
    ("beginning", "output", "is_refusal"),
    [
        (None, "I'm sorry, but I can't help.", True),
        (None, "Paris.", False),
        (None, "", True),
        (Beginning.EITHER, "<think>I'm sorry, but I</think>Paris.", False),
        (Beginning.EITHER, "<think>Paris.</think>I'm sorry, but I can't help.", True),
    ],
)
def test_the_answer_shows_a_refusal_and_its_reasoning_does_not(
    tokenizer: Tokenizer, beginning: Beginning | None, output: str, is_refusal: bool
) -> None:
    eos = min(tokenizer.eos_token_ids)
    tokens = (TokensGenerated("r", [token]) for token in [*tokenizer.encode(output), eos])
    scenario = Scenario(
        tokenizer,
        script(started(), *tokens, finished(FinishReason.STOP)),
        stop_token_ids=(eos,),
        reasoning=None if beginning is None else Reasoning(THINK, beginning),
        arm=ARM,
    )
    run(scenario.deltas())
    assert scenario.measures.is_refusal is is_refusal
    assert (scenario.measures.token_seconds is None) == (output == "")


def test_a_failed_answer_is_neither_a_refusal_nor_none(tokenizer: Tokenizer) -> None:
    broken = script(started(), finished(FinishReason.ABORTED, "engine_error"))
    scenario = Scenario(tokenizer, broken, arm=ARM)
    with pytest.raises(Exception, match="planted"):
        run(scenario.deltas())
    assert scenario.measures.is_refusal is None


# --- faults ---------------------------------------------------------------------------------------


class Unavailable:
    """Stands in for the control plane: it fails for one tenant."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure
        self.written: list[str] = []

    async def write(self, tenant_id: str, change: object) -> None:
        if tenant_id == "acme":
            raise self._failure
        self.written.append(tenant_id)


@pytest.mark.parametrize("failure", [DatabaseUnavailable(), ValueError("a defect")])
def test_an_alias_that_cannot_be_compared_stops_no_other(failure: Exception) -> None:
    async def compare() -> list[str]:
        control_plane = Unavailable(failure)
        watch = CanaryWatch(cast(ControlPlane, control_plane), Metrics(lambda: None))
        for tenant_id in ("acme", "bolt"):
            arm = Arm(ARM.split._replace(tenant_id=tenant_id), is_canary=False)
            watch.add("", RequestMeasures(arm=arm))
        watch.add("", RequestMeasures())
        await watch.flush()
        await watch.flush()
        return control_plane.written

    assert asyncio.run(compare()) == ["bolt"]
