"""The speculation parameters of a request, and the reported acceptance of an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.engine.errors import InvalidParameter
from loraplex.engine.messages import ExplainAdapter, GenerationRequest, SpeculationParams, Submit
from loraplex.engine.sampling_params import SamplingParams
from support.engine import LocalEngine
from support.models import make_adapter

PROMPT = [1, 2, 3] * 6


@pytest.mark.parametrize("num_tokens", [-1, 65])
def test_a_number_of_drafts_out_of_range_is_refused(num_tokens: int) -> None:
    with pytest.raises(InvalidParameter, match=r"speculation\.num_tokens"):
        SpeculationParams(num_tokens=num_tokens)


@pytest.mark.parametrize("served", [(), ("ngram",)])
def test_a_proposer_that_the_engine_does_not_run_ends_the_request(
    tiny_base: Path, tmp_path: Path, served: tuple[str, ...]
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, speculation=served)
    asked = SpeculationParams("medusa", 3)
    request = GenerationRequest("r", "acme", PROMPT, SamplingParams(), speculation=asked)
    engine.core.handle(Submit(request))
    engine.run()
    finished = engine.answers["r"].finished
    engine.close()
    assert finished is not None
    assert finished.error is not None
    assert finished.error.code == "proposer_not_served"
    assert engine.core.info.proposers == list(served)


def test_an_explanation_has_the_drafts_of_its_adapter_alone(
    tiny_base: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, speculation=("ngram",))
    keys = [engine.add_adapter(make_adapter(tiny_base, tmp_path / n, seed=ord(n))) for n in "ab"]
    for key in (None, *keys):
        asked = SpeculationParams(num_tokens=4)  # not as many as pay: that depends on the machine
        engine.submit(PROMPT, key, speculation=asked, max_tokens=24, logit_bias={7: 100.0})
    engine.run()
    engine.core.handle(ExplainAdapter(keys[0]))
    engine.step()
    (explanation,) = engine.explanations
    everything = engine.core.stats().speculation
    engine.close()
    (told,) = explanation.speculation
    assert told in everything
    assert (told.key, told.proposer) == (keys[0], "ngram")
    assert told.num_accepted_tokens > 0
    assert {entry.key for entry in everything} == {None, *keys}


def test_an_event_tells_how_many_of_its_tokens_were_drafted(
    tiny_base: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, speculation=("ngram",))
    asked = SpeculationParams(num_tokens=4)  # not as many as pay: that depends on the machine
    request_id = engine.submit(PROMPT, speculation=asked, max_tokens=24, logit_bias={7: 100.0})
    engine.run()
    answer = engine.answers[request_id]
    engine.close()
    finished = answer.finished
    assert finished is not None
    assert sum(event.num_draft_tokens for event in answer.tokens) == finished.num_draft_tokens
    held = sum(len(event.token_ids) - 1 for event in answer.tokens)
    assert held == finished.num_accepted_tokens > 0
