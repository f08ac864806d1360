"""A server killed between two effects of an evaluation: the evaluation ends, and nothing is asked
or charged twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from loraplex.adapters.failpoints import EVALUATION_FAILPOINTS, VARIABLE
from support.evaluations import ended, put_set, start
from support.server import Caller, serving

pytestmark = pytest.mark.slow

NAME = ("--served-model-name", "tiny")
CASE = {"id": "a", "prompt": "x", "expected": "y", "request": {"max_tokens": 2}}


@pytest.mark.parametrize("point", EVALUATION_FAILPOINTS)
def test_a_kill_between_two_effects_of_an_evaluation_leaves_it_exact(
    tiny_base: Path, tmp_path: Path, adapters: list[Path], point: str
) -> None:
    with serving(tiny_base, tmp_path, *NAME, **{VARIABLE: point}) as armed:
        caller = armed.make_caller("acme")
        caller.push(adapters[0], "bot", aliases=["prod"])
        put_set(caller, [CASE, {**CASE, "id": "b", "scorer": "embedding"}])
        evaluation_id = start(caller, 1)["id"]
        assert armed.process.wait(300) == -signal.SIGKILL
    with serving(tiny_base, tmp_path, *NAME) as server:
        again = Caller(server.url, caller.tenant_id, caller.slug, caller.key)
        server.callers.append(again)
        done = ended(again, evaluation_id)
        assert done["status"] == "succeeded"
        batches = {batch.id: batch for batch in again.openai.batches.list()}
        assert set(batches) == set(done["batches"].values()), "none is asked twice"
        num_lines = sum(
            each.request_counts.total for each in batches.values() if each.request_counts
        )
        usage = again.http.get("/v1/usage").json()["data"]
        assert sum(each["requests"] for each in usage) == num_lines
        assert len(list(again.openai.files.list(purpose="batch"))) == len(batches)
