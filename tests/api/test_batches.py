"""`/v1/batches` through the unmodified openai client."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import httpx
import pytest
from openai import BadRequestError, ConflictError, NotFoundError, PermissionDeniedError
from sqlalchemy import select

from loraplex.platform.base import utc_now
from loraplex.platform.models import AuditEntry, Batch, BatchResult, StoredFile, UsageRecord
from support.batches import completions, create, ended, jsonl, line, lines_of
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

PROMPTS = [f"prompt {number}" for number in range(7)]
CHAT = {"model": "bot", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "temperature": 0},
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 3, "temperature": 0},
    "/v1/embeddings": {"model": "bot", "input": "hi"},
    "/v1/responses": {"model": "bot", "input": "hi", "max_output_tokens": 3, "temperature": 0},
}
OWN_IDENTITY = {"id", "created", "created_at", "usage"}


def content_of(body: dict[str, Any]) -> dict[str, Any]:
    """What does not differ between two answers to the same request."""
    text = json.dumps({name: body[name] for name in body.keys() - OWN_IDENTITY}, sort_keys=True)
    found: dict[str, Any] = json.loads(text)
    for item in found.get("output", ()):
        item.pop("id", None)
    return found


def ledger(server: ServerUnderTest, caller: Caller) -> dict[str, UsageRecord]:
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        rows = {row.request_id: row for row in session.scalars(select(UsageRecord))}
    database.close()
    return rows


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_line_is_answered_as_a_request_is(resident: Caller, endpoint: Any) -> None:
    body = BODIES[endpoint]
    batch = create(resident.openai, jsonl([line("a", body, endpoint)]), endpoint)
    batch = ended(resident.openai, batch.id)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    (result,) = lines_of(resident.openai, batch.output_file_id)
    direct = resident.http.post(endpoint, json=body)
    assert result["custom_id"] == "a"
    assert result["error"] is None
    assert result["response"]["status_code"] == direct.status_code == 200
    assert content_of(result["response"]["body"]) == content_of(direct.json())


def test_each_line_is_answered_and_charged_once_in_the_order_of_the_file(
    server: ServerUnderTest, caller: Caller
) -> None:
    client = caller.openai
    lines = completions("tiny", PROMPTS)
    lines.insert(3, line("bad", {"model": "no-such", "prompt": "x"}))
    batch = create(client, jsonl(lines), metadata={"job": "nightly"})
    assert (batch.status, batch.metadata) == ("validating", {"job": "nightly"})
    batch = ended(client, batch.id)
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 8, 7, 1)
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.completed_at or 0)
    answers = lines_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"line-{n}" for n in range(7)]
    (error,) = lines_of(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 404)
    assert error["response"]["body"]["error"]["code"] == "model_not_found"
    rows = ledger(server, caller)
    assert rows.keys() == {each["response"]["request_id"] for each in answers}
    for each in answers:
        row, usage = rows[each["response"]["request_id"]], each["response"]["body"]["usage"]
        assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )
        assert row.key_id is not None


def test_nothing_of_the_lines_stays_in_the_database(
    server: ServerUnderTest, caller: Caller
) -> None:
    batch = create(caller.openai, jsonl(completions("tiny", PROMPTS[:2])))
    ended(caller.openai, batch.id)
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        assert session.scalars(select(BatchResult)).all() == []
        actions = list(session.scalars(select(AuditEntry.action).order_by(AuditEntry.number)))
    database.close()
    assert actions[-3:] == ["file.upload", "batch.create", "batch.end"]


BODY = {"model": "tiny", "prompt": "x"}
INVALID: dict[str, tuple[bytes, str, int | None]] = {
    "no JSON": (jsonl([line("a", BODY)]) + b"{", "invalid_json", 2),
    "not UTF-8": (b'{"custom_id": "\xff"}\n', "invalid_json", 1),
    "no object": (b"[1]\n", "invalid_parameter", 1),
    "no custom_id": (
        b'{"method":"POST","url":"/v1/completions","body":{}}',
        "invalid_parameter",
        1,
    ),
    "an empty custom_id": (jsonl([line("", BODY)]), "invalid_parameter", 1),
    "a long custom_id": (jsonl([line("a" * 513, BODY)]), "invalid_parameter", 1),
    "another field": (jsonl([{**line("a", BODY), "x": 1}]), "invalid_parameter", 1),
    "the same custom_id": (
        jsonl([line("a", BODY), line("b", BODY), line("a", BODY)]),
        "duplicate_custom_id",
        3,
    ),
    "another method": (jsonl([{**line("a", BODY), "method": "GET"}]), "invalid_parameter", 1),
    "another route": (jsonl([line("a", BODY, "/v1/embeddings")]), "invalid_parameter", 1),
    "a route of the platform": (jsonl([line("a", BODY, "/v1/keys")]), "invalid_parameter", 1),
    "a stream": (jsonl([line("a", {**BODY, "stream": True})]), "unsupported_parameter", 1),
    "a body that is no object": (jsonl([line("a", [1])]), "invalid_parameter", 1),  # type: ignore[arg-type]
    "no line": (b"\n  \n", "invalid_parameter", None),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_file_fails_the_batch_and_costs_nothing(
    server: ServerUnderTest, resident: Caller, case: str
) -> None:
    content, code, number = INVALID[case]
    batch = ended(resident.openai, create(resident.openai, content).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at
    assert batch.errors is not None
    (error,) = batch.errors.data or []
    assert (error.code, error.line) == (code, number)


def test_every_wrong_line_is_reported_up_to_a_hundred(caller: Caller) -> None:
    batch = create(caller.openai, jsonl(line("a", {"stream": True}) for _ in range(101)))
    batch = ended(caller.openai, batch.id)
    assert batch.errors is not None
    assert [error.line for error in batch.errors.data or ()] == list(range(1, 101))


def test_what_is_asked_is_checked(caller: Caller, make_caller: Any) -> None:
    client = caller.openai
    file = client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    more: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    for change in (
        {"endpoint": "/v1/keys"},
        {"completion_window": "1h"},
        {"metadata": {"a": "b" * 513}},
        {"metadata": {str(number): "" for number in range(17)}},
    ):
        with pytest.raises(BadRequestError):
            client.batches.create(input_file_id=file.id, **{**more, **change})
    with pytest.raises(NotFoundError) as refused:
        client.batches.create(input_file_id="file-none", **more)
    assert refused.value.code == "file_not_found"
    with pytest.raises(NotFoundError):
        client.batches.retrieve("batch_none")
    other = make_caller().openai
    with pytest.raises(NotFoundError):
        other.batches.create(input_file_id=file.id, **more)
    batch = client.batches.create(input_file_id=file.id, **more)
    for ask in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(NotFoundError):
            ask(batch.id)
    assert list(other.batches.list()) == []


def test_results_are_no_input(caller: Caller) -> None:
    batch = ended(caller.openai, create(caller.openai, jsonl(completions("tiny", ["x"]))).id)
    with pytest.raises(BadRequestError) as refused:
        caller.openai.batches.create(
            input_file_id=batch.output_file_id or "",
            endpoint="/v1/completions",
            completion_window="24h",
        )
    assert refused.value.param == "input_file_id"


def test_batches_are_listed_page_by_page_the_newest_first(caller: Caller) -> None:
    content = jsonl(completions("tiny", ["x"]))
    made = [create(caller.openai, content).id for _ in range(3)]
    assert [each.id for each in caller.openai.batches.list(limit=2)] == made[::-1]


def test_an_operator_and_a_signed_in_user_need_a_key(
    server: ServerUnderTest, caller: Caller
) -> None:
    file = caller.openai.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    operator = server.make_operator("batch-admin")
    answer = caller.http.post(
        "/v1/batches",
        json={
            "input_file_id": file.id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
        headers={"authorization": f"Bearer {operator}", "x-loraplex-tenant": caller.slug},
    )
    check_envelope(answer, "key_required")


def issue(caller: Caller, **grant: Any) -> dict[str, Any]:
    answer = caller.http.post("/v1/keys", json={"name": "batch", "scopes": ["infer"], **grant})
    issued: dict[str, Any] = answer.raise_for_status().json()
    return issued


def test_a_key_restricted_to_adapters_uses_these_and_sees_its_own_batches(
    resident: Caller,
) -> None:
    restricted = resident.openai.with_options(api_key=issue(resident, adapters=["bot"])["key"])
    lines = [line("a", {"model": "bot", "prompt": "x", "max_tokens": 1}), line("b", BODY)]
    foreign = create(resident.openai, jsonl(lines))
    own = ended(restricted, create(restricted, jsonl(lines)).id)
    assert [each["custom_id"] for each in lines_of(restricted, own.output_file_id)] == ["a"]
    (error,) = lines_of(restricted, own.error_file_id)
    assert error["response"]["status_code"] == 404
    assert [each.id for each in restricted.batches.list()] == [own.id]
    files = {each.id for each in restricted.files.list()}
    assert files == {own.input_file_id, own.output_file_id, own.error_file_id}
    for ask in (restricted.batches.retrieve, restricted.batches.cancel):
        with pytest.raises(NotFoundError):
            ask(foreign.id)
    for ask_file in (restricted.files.retrieve, restricted.files.content, restricted.files.delete):
        with pytest.raises(NotFoundError):
            ask_file(foreign.input_file_id)
    ended(resident.openai, foreign.id)


def slow_lines(num_lines: int) -> bytes:
    """Lines that are answered one after the other, because each of them takes long."""
    return jsonl(completions("tiny", [f"p{n}" for n in range(num_lines)], max_tokens=150, n=8))


def num_answered(caller: Caller, batch_id: str) -> int:
    counts = caller.openai.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed + counts.failed


def test_a_revoked_key_fails_the_lines_that_are_left(
    server: ServerUnderTest, caller: Caller
) -> None:
    key = issue(caller)
    batch = create(caller.openai.with_options(api_key=key["key"]), slow_lines(300))
    wait_for(lambda: num_answered(caller, batch.id) > 0, seconds=60)
    caller.http.delete(f"/v1/keys/{key['id']}").raise_for_status()
    batch = ended(caller.openai, batch.id)
    answers = lines_of(caller.openai, batch.output_file_id)
    errors = lines_of(caller.openai, batch.error_file_id)
    assert len(answers) + len(errors) == 300
    assert batch.status == "completed"
    assert {each["response"]["body"]["error"]["code"] for each in errors} == {"invalid_api_key"}
    assert ledger(server, caller).keys() == {each["response"]["request_id"] for each in answers}


def test_a_cancelled_batch_keeps_its_results_and_charges_them_only(
    server: ServerUnderTest, caller: Caller
) -> None:
    batch = create(caller.openai, slow_lines(300))
    wait_for(lambda: num_answered(caller, batch.id) > 0, seconds=60)
    with pytest.raises(ConflictError) as in_use:
        caller.openai.files.delete(batch.input_file_id)
    assert in_use.value.code == "file_in_use"
    assert caller.openai.batches.cancel(batch.id).status == "cancelling"
    assert caller.openai.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
    batch = ended(caller.openai, batch.id)
    assert (batch.status, bool(batch.cancelled_at)) == ("cancelled", True)
    answers = lines_of(caller.openai, batch.output_file_id)
    errors = lines_of(caller.openai, batch.error_file_id)
    assert len(answers) + len(errors) == 300
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert {each["custom_id"] for each in answers + errors} == {f"line-{n}" for n in range(300)}
    assert ledger(server, caller).keys() == {each["response"]["request_id"] for each in answers}
    with pytest.raises(ConflictError):
        caller.openai.batches.cancel(ended(caller.openai, create_short(caller)).id)
    assert caller.openai.files.delete(batch.input_file_id).deleted


def create_short(caller: Caller) -> str:
    return create(caller.openai, jsonl(completions("tiny", ["x"]))).id


def test_a_batch_expires_with_the_results_it_has(server: ServerUnderTest, caller: Caller) -> None:
    batch = create(caller.openai, slow_lines(300))
    wait_for(lambda: num_answered(caller, batch.id) > 0, seconds=60)
    database = server.database
    with database.transaction(caller.tenant_id) as session:
        session.get_one(Batch, batch.id).expires_at = utc_now() - timedelta(seconds=1)
    database.close()
    batch = ended(caller.openai, batch.id)
    assert (batch.status, bool(batch.expired_at)) == ("expired", True)
    errors = lines_of(caller.openai, batch.error_file_id)
    assert len(errors) + len(lines_of(caller.openai, batch.output_file_id)) == 300
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}


def test_a_tenants_limits_delay_lines_and_do_not_fail_them(
    server: ServerUnderTest, caller: Caller
) -> None:
    operator = server.make_operator("batch-limits")
    answer = httpx.put(
        f"{server.url}/admin/tenants/{caller.slug}/quota",
        json={"concurrent_requests": 2},
        headers={"authorization": f"Bearer {operator}"},
    )
    answer.raise_for_status()
    batch = create(caller.openai, jsonl(completions("tiny", [f"p{n}" for n in range(20)])))
    batch = ended(caller.openai, batch.id)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (20, 0)


def test_files_are_counted_listed_sent_and_deleted(server: ServerUnderTest, caller: Caller) -> None:
    client = caller.openai
    made = [client.files.create(file=(f"{n}.jsonl", b"{}\n" * n), purpose="batch") for n in (1, 2)]
    first = made[0]
    assert (first.object, first.filename, first.bytes, first.purpose) == (
        *("file", "1.jsonl", 3),
        "batch",
    )
    assert first.expires_at == first.created_at + 30 * 24 * 3600
    assert [each.id for each in client.files.list()] == [each.id for each in reversed(made)]
    assert [each.id for each in client.files.list(order="asc", limit=1)] == [
        each.id for each in made
    ]
    assert list(client.files.list(purpose="batch_output")) == []
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).content == b"{}\n"
    objects = server.settings.data_dir / "store" / "t" / caller.tenant_id / "f"
    assert {path.name for path in objects.iterdir()} >= {first.id}
    assert client.files.delete(first.id).deleted
    assert list((objects / first.id).iterdir()) == []
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(NotFoundError):
            ask(first.id)


def test_a_file_is_kept_as_long_as_its_form_says(server: ServerUnderTest, caller: Caller) -> None:
    file = caller.openai.files.create(
        file=("in.jsonl", b"{}"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert file.expires_at == file.created_at + 7200
    database = server.database
    with database.transaction(caller.tenant_id) as session:
        session.get_one(StoredFile, file.id).expires_at = utc_now()
    database.close()
    with pytest.raises(NotFoundError):
        caller.openai.files.retrieve(file.id)
    assert list(caller.openai.files.list()) == []


FORMS: dict[str, tuple[dict[str, Any], str | None]] = {
    "no file": ({"data": {"purpose": "batch"}, "files": {"other": (None, b"x")}}, "file"),
    "an empty file": ({"data": {"purpose": "batch"}, "files": {"file": b""}}, "file"),
    "no purpose": ({"files": {"file": b"x"}}, "purpose"),
    "another purpose": ({"data": {"purpose": "vision"}, "files": {"file": b"x"}}, "purpose"),
    "another field": (
        {"data": {"purpose": "batch", "more": "1"}, "files": {"file": b"x"}},
        "more",
    ),
    "a short time": (
        {
            "data": {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "1",
            },
            "files": {"file": b"x"},
        },
        "expires_after.seconds",
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_form_that_is_not_understood_is_refused(caller: Caller, case: str) -> None:
    sent, param = FORMS[case]
    answer = caller.http.post("/v1/files", **sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_type_is_refused(caller: Caller) -> None:
    answer = caller.http.post("/v1/files", json={})
    check_envelope(answer, "unsupported_media_type")


def test_the_key_needs_the_scope(caller: Caller) -> None:
    key = issue(caller, scopes=["usage:read"])["key"]
    with pytest.raises(PermissionDeniedError):
        caller.openai.with_options(api_key=key).batches.list()
