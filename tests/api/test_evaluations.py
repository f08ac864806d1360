"""Golden sets and evaluations on a running server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import ConflictError
from sqlalchemy import select

from loraplex.api.evaluation.golden_set import GoldenSet
from loraplex.api.evaluation.report import Models, Report
from loraplex.platform.keys.principal import Scope
from loraplex.platform.models import AuditEntry
from support.envelopes import check_envelope
from support.evaluations import answer_of, ended, expecting, get, put_set, start, upload_cases
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

PROMPTS = ["one", "two two", "three"]
SETS = "/v1/adapters/bot/golden-sets"
EVALUATIONS = "/v1/adapters/bot/evaluations"
CASE = {"id": "a", "prompt": "x", "expected": "y", "request": {"max_tokens": 1}}


@pytest.fixture
def owner(caller: Caller, adapters: list[Path]) -> Caller:
    """A tenant with `bot@1`, which requests get, and `bot@2`."""
    caller.push(adapters[0], "bot", aliases=["prod"])
    caller.push(adapters[1], "bot", aliases=["next"])
    return caller


@pytest.fixture(scope="module")
def lasting(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    """The same for tests that start no evaluation."""
    caller = server.make_caller("golden-sets")
    caller.push(adapters[0], "bot", aliases=["prod"])
    return caller


def test_a_version_is_compared_with_the_one_that_requests_get(
    owner: Caller, tmp_path: Path
) -> None:
    cases = expecting(owner, "bot@2", PROMPTS)
    cases[0]["slices"] = ["first"]
    put_set(owner, cases, tolerance=0.1)
    begun = start(owner, 2)
    assert (begun["status"], begun["version"], begun["against"]) == ("queued", 2, 1)
    assert "cases" not in begun
    done = ended(owner, begun["id"])
    assert (done["status"], done["is_regression"], done["error"]) == ("succeeded", False, None)
    compared = {case["id"]: case for case in done["cases"]}
    texts = {
        model: [answer_of(owner, model, prompt) for prompt in PROMPTS]
        for model in ("bot@2", "bot@1", "tiny")
    }
    for at, prompt in enumerate(PROMPTS):
        case = compared[prompt]
        assert case["candidate"] == {"answer": texts["bot@2"][at], "score": 1.0}
        assert case["against"]["answer"] == texts["bot@1"][at], "as without a batch"
        assert case["base"]["answer"] == texts["tiny"][at]
        assert (case["prompt"], case["expected"]) == (prompt, texts["bot@2"][at])
    path = tmp_path / "golden.jsonl"
    path.write_bytes(owner.openai.files.content(file_of(owner)).read())
    scores = {
        model: [
            float(text.strip() == each.strip())
            for text, each in zip(of, texts["bot@2"], strict=True)
        ]
        for model, of in texts.items()
    }
    alone = Report.of(
        GoldenSet.read(path),
        Models("bot@2", "bot@1", "tiny"),
        texts,
        scores,
        tolerance=0.1,
        sha256="",
    )
    first, second = done["slices"]
    assert (first["slice"], second["slice"], second["num_cases"]) == ("all", "first", 1)
    for view, expected in zip((first, second), alone.slices, strict=True):
        assert view["difference"]["mean"] == pytest.approx(expected.difference.mean)
        assert view["difference"]["low"] == pytest.approx(expected.difference.low)
        assert view["base"]["high"] == pytest.approx(expected.base.high)


def file_of(caller: Caller) -> str:
    file: str = caller.http.get(f"{SETS}/golden").json()["file"]
    return file


@pytest.mark.slow
def test_a_regression_is_found_and_its_cases_come_first(owner: Caller) -> None:
    put_set(owner, expecting(owner, "bot@1", PROMPTS))
    done = ended(owner, start(owner, 2)["id"])
    assert (done["status"], done["is_regression"]) == ("succeeded", True)
    gains = [case["candidate"]["score"] - case["against"]["score"] for case in done["cases"]]
    assert gains == sorted(gains)
    assert gains[0] < 0
    listed = owner.http.get(EVALUATIONS).json()["data"]
    assert [each["id"] for each in listed] == [done["id"]]
    assert listed[0] == {key: value for key, value in done.items() if key != "cases"}


@pytest.mark.slow
def test_an_evaluation_is_charged_as_the_lines_of_its_batches(
    server: ServerUnderTest, owner: Caller
) -> None:
    put_set(owner, [{**CASE, "scorer": "embedding"}])
    before = owner.http.get("/v1/usage").json()["data"]
    done = ended(owner, start(owner, 2, against="base")["id"])
    assert (done["status"], done["against"]) == ("succeeded", None)
    assert list(done["batches"]) == ["answers", "embeddings"]
    batches = {each.id: each for each in owner.openai.batches.list()}
    assert set(batches) == set(done["batches"].values())
    assert all(each.metadata == {"evaluation": done["id"]} for each in batches.values())
    counts = [batches[each].request_counts for each in done["batches"].values()]
    assert [each.total for each in counts if each] == [2, len(texts_of(done))]
    after = owner.http.get("/v1/usage").json()["data"]
    num_requests = sum(each["requests"] for each in after) - sum(
        each["requests"] for each in before
    )
    assert num_requests == sum(each.total for each in counts if each)
    database = server.database
    with database.transaction(owner.tenant_id, read_only=True) as session:
        actions = list(session.scalars(select(AuditEntry.action).order_by(AuditEntry.number)))
    database.close()
    assert [each for each in actions if each.startswith(("evaluation.", "golden_set."))] == [
        *("golden_set.put", "evaluation.start"),
        *("evaluation.ask", "evaluation.ask", "evaluation.end"),
    ]


def texts_of(done: dict[str, Any]) -> set[str]:
    """The different texts that were embedded."""
    (case,) = done["cases"]
    answers = {case[model]["answer"] for model in ("candidate", "base")}
    return {text for text in {case["expected"], *answers} if text.strip()}


@pytest.mark.slow
def test_the_version_that_requests_get_is_compared_with_the_base(owner: Caller) -> None:
    put_set(owner, [CASE])
    begun = start(owner, 1)
    assert (begun["version"], begun["against"]) == (1, None)
    same = owner.http.post(EVALUATIONS, json={"version": 1, "golden_set": "golden", "against": 1})
    check_envelope(same, "invalid_parameter", "against")
    owner.http.post(f"{EVALUATIONS}/{begun['id']}/cancel")


@pytest.mark.slow
def test_a_request_that_fails_fails_the_evaluation_with_its_error(owner: Caller) -> None:
    put_set(owner, [CASE, {**CASE, "id": "b", "request": {"max_tokens": -1}}])
    done = ended(owner, start(owner, 2)["id"])
    assert (done["status"], done["slices"], done["cases"]) == ("failed", None, None)
    assert done["error"]["code"] == "requests_failed"
    assert "3 of 6 requests have failed: " in done["error"]["message"]
    assert "max_tokens" in done["error"]["message"]


@pytest.mark.slow
def test_a_cancelled_evaluation_cancels_its_batch(owner: Caller) -> None:
    long = {"max_tokens": 200, "ignore_eos": True}
    put_set(owner, [{**CASE, "id": str(at), "request": long} for at in range(100)])
    begun = start(owner, 2)
    wait_for(lambda: get(owner, begun["id"])["batches"] != {})
    cancelled = owner.http.post(f"{EVALUATIONS}/{begun['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    again = owner.http.post(f"{EVALUATIONS}/{begun['id']}/cancel").json()
    assert again == cancelled
    batch_id = cancelled["batches"]["answers"]
    wait_for(lambda: owner.openai.batches.retrieve(batch_id).status == "cancelled")


@pytest.mark.slow
def test_a_cancelled_batch_fails_the_evaluation(owner: Caller) -> None:
    long = {"max_tokens": 200, "ignore_eos": True}
    put_set(owner, [{**CASE, "id": str(at), "request": long} for at in range(100)])
    begun = start(owner, 2)
    wait_for(lambda: get(owner, begun["id"])["batches"] != {})
    batch_id = get(owner, begun["id"])["batches"]["answers"]
    owner.openai.batches.cancel(batch_id)
    done = ended(owner, begun["id"])
    assert (done["status"], done["error"]["code"]) == ("failed", "batch_not_completed")
    assert batch_id in done["error"]["message"]


@pytest.mark.slow
def test_a_file_that_is_no_golden_set_is_refused_with_its_line(lasting: Caller) -> None:
    def put(cases: Any, **more: Any) -> httpx.Response:
        body = {"file": upload_cases(lasting, cases), **more}
        return lasting.http.put(f"{SETS}/wrong", json=body)

    def problem(cases: Any) -> str:
        message: str = check_envelope(put(cases), "invalid_golden_set", "file")["message"]
        return message

    assert "line 2: a case has either messages or prompt" in problem([CASE, {"id": "b"}])
    deep = b'{"id": "a", "prompt": "x", "expected": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert "line 1" in problem(deep)
    many = [{**CASE, "id": str(at)} for at in range(1001)]
    assert "more than 1000 cases" in problem(many)
    judged = [{**CASE, "scorer": "judge"}]
    check_envelope(put(judged), "invalid_parameter", "judge")
    assert put(judged, judge="tiny").status_code == 200
    other = lasting.openai.files.create(file=("x.jsonl", b"{}"), purpose="batch").id
    answer = lasting.http.put(f"{SETS}/wrong", json={"file": other})
    check_envelope(answer, "invalid_parameter", "file")
    check_envelope(lasting.http.put(f"{SETS}/wrong", json={"file": "none"}), "file_not_found")
    answer = lasting.http.put(f"{SETS}/-", json={"file": other})
    check_envelope(answer, "invalid_parameter", "golden_set")


def test_golden_sets_are_listed_replaced_and_removed(lasting: Caller) -> None:
    first = put_set(lasting, [CASE], "kept", tolerance=0.5)
    assert (first["num_cases"], first["tolerance"], first["judge"]) == (1, 0.5, None)
    second = put_set(lasting, [CASE, {**CASE, "id": "b"}], "kept")
    assert (second["num_cases"], second["tolerance"]) == (2, 0.0)
    assert second["sha256"] != first["sha256"]
    assert second in lasting.http.get(SETS).json()["data"]
    assert lasting.http.get(f"{SETS}/kept").json() == second
    assert lasting.http.delete(f"{SETS}/kept").status_code == 204
    check_envelope(lasting.http.get(f"{SETS}/kept"), "golden_set_not_found")
    check_envelope(lasting.http.delete(f"{SETS}/kept"), "golden_set_not_found")
    answer = lasting.http.post(EVALUATIONS, json={"version": 1, "golden_set": "kept"})
    check_envelope(answer, "golden_set_not_found")


def test_the_file_of_a_golden_set_cannot_be_deleted(lasting: Caller) -> None:
    file = put_set(lasting, [CASE], "used")["file"]
    with pytest.raises(ConflictError, match="The golden set `used` of `bot`"):
        lasting.openai.files.delete(file)
    lasting.http.delete(f"{SETS}/used")
    assert lasting.openai.files.delete(file).deleted


def test_an_evaluation_needs_an_unrestricted_key_that_may_infer(
    server: ServerUnderTest, lasting: Caller
) -> None:
    put_set(lasting, [CASE], "keys")
    body = {"version": 1, "golden_set": "keys"}

    def start_with(**grant: Any) -> httpx.Response:
        key = lasting.http.post("/v1/keys", json={"name": "x", **grant}).json()["key"]
        return lasting.http.post(EVALUATIONS, json=body, headers={"authorization": f"Bearer {key}"})

    writer = start_with(scopes=[Scope.ADAPTERS_WRITE])
    check_envelope(writer, "insufficient_scope")
    restricted = start_with(scopes=[Scope.ADAPTERS_WRITE, Scope.INFER], adapters=["bot"])
    check_envelope(restricted, "key_required")
    operator = {"authorization": f"Bearer {server.make_operator('evaluations')}"}
    operator["x-loraplex-tenant"] = "golden-sets"
    started = lasting.http.post(EVALUATIONS, json=body, headers=operator)
    assert started.status_code == 200, "the key that set the golden set asks"
    lasting.http.post(f"{EVALUATIONS}/{started.json()['id']}/cancel")


@pytest.mark.slow
def test_a_deleted_adapter_takes_its_golden_sets_and_evaluations_along(
    make_caller: Callable[[], Caller], adapters: list[Path]
) -> None:
    caller = make_caller()
    caller.push(adapters[0], "bot", aliases=["prod"])
    long = {"max_tokens": 200, "ignore_eos": True}
    file = put_set(caller, [{**CASE, "id": str(at), "request": long} for at in range(50)])["file"]
    begun = start(caller, 1)
    wait_for(lambda: get(caller, begun["id"])["batches"] != {})
    batch_id = get(caller, begun["id"])["batches"]["answers"]
    assert caller.http.delete("/v1/adapters/bot").status_code == 200
    check_envelope(caller.http.get(f"{EVALUATIONS}/{begun['id']}"), "evaluation_not_found")
    check_envelope(caller.http.get(SETS), "adapter_not_found")
    wait_for(lambda: caller.openai.batches.retrieve(batch_id).status == "cancelled")
    assert caller.openai.files.delete(file).deleted, "nothing uses it"
