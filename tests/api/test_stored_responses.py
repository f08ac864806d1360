"""Stored responses through the unmodified openai client."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import openai
import pytest
from sqlalchemy import select

from loraplex.platform.base import utc_now
from loraplex.platform.models import AuditEntry, StoredResponse
from support.batches import create, ended, jsonl, line, lines_of
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest

GO_ON: dict[str, Any] = {"ignore_eos": True, "seed": 5}
ASK: dict[str, Any] = {"model": "bot", "input": "Hello there", "max_output_tokens": 8}


def ask(caller: Caller, **options: Any) -> Any:
    return caller.openai.responses.create(**{**ASK, **options}, extra_body=GO_ON)


def stored_rows(server: ServerUnderTest, caller: Caller) -> dict[str, StoredResponse]:
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        rows = {row.id: row for row in session.scalars(select(StoredResponse))}
    database.close()
    return rows


def test_a_stored_response_is_returned_as_it_was(resident: Caller, server: ServerUnderTest) -> None:
    response = ask(resident, store=True, metadata={"a": "b"}, instructions="Be brief")
    assert response.store is True
    assert resident.openai.responses.retrieve(response.id) == response
    row = stored_rows(server, resident)[response.id]
    assert row.expires_at - row.created_at == timedelta(days=30)
    assert row.size_bytes == len(row.input) + len(row.response)


def test_a_response_is_not_stored_unless_the_request_says_so(
    resident: Caller, server: ServerUnderTest
) -> None:
    for options in ({}, {"store": False}, {"store": None}):
        response = ask(resident, **options)
        assert response.store is False
        with pytest.raises(openai.NotFoundError) as refused:
            resident.openai.responses.retrieve(response.id)
        assert refused.value.code == "response_not_found"
        assert response.id not in stored_rows(server, resident)


def test_a_stream_is_stored_before_its_last_event(resident: Caller) -> None:
    stream = ask(resident, store=True, stream=True)
    for event in stream:
        if event.type == "response.created":
            assert event.response.store is True
        if event.type == "response.incomplete":
            assert resident.openai.responses.retrieve(event.response.id) == event.response
            return
    pytest.fail("no last event")


def test_a_conversation_is_continued_as_if_its_items_had_been_sent(resident: Caller) -> None:
    first = ask(resident, input="a", store=True)
    second = ask(
        resident,
        input=[{"role": "user", "content": "b"}],
        store=True,
        previous_response_id=first.id,
    )
    third = ask(resident, input="c", previous_response_id=second.id)
    items: list[Any] = [
        {"role": "user", "content": "a"},
        *first.output,
        {"role": "user", "content": "b"},
        *second.output,
        {"role": "user", "content": "c"},
    ]
    sent = ask(resident, input=items)
    assert third.previous_response_id == second.id
    assert third.output_text == sent.output_text
    assert third.usage.input_tokens == sent.usage.input_tokens
    other_branch = ask(resident, input="d", previous_response_id=first.id)
    assert other_branch.usage.input_tokens < third.usage.input_tokens


def test_instructions_are_not_inherited(resident: Caller) -> None:
    first = ask(resident, input="a", instructions="Be brief", store=True)
    second = ask(resident, input="b", previous_response_id=first.id)
    items: list[Any] = [
        {"role": "user", "content": "a"},
        *first.output,
        {"role": "user", "content": "b"},
    ]
    assert second.instructions is None
    assert second.usage.input_tokens == ask(resident, input=items).usage.input_tokens


def test_the_result_of_a_call_continues_the_response_that_called(resident: Caller) -> None:
    tool: Any = {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    pytest.importorskip("llguidance", reason="grammars need llguidance")
    body = {**ASK, "tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
    first = resident.openai.responses.create(**body, store=True, extra_body={"seed": 5})
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    second = ask(resident, input=[result], previous_response_id=first.id)
    sent = ask(resident, input=[{"role": "user", "content": "Hello there"}, call, result])
    assert second.output_text == sent.output_text
    assert second.usage.input_tokens == sent.usage.input_tokens


def test_input_items_are_paged(resident: Caller) -> None:
    items: list[Any] = [{"role": "user", "content": f"message {number}"} for number in range(5)]
    first = ask(resident, input="earlier", store=True)
    response = ask(resident, input=items, store=True, previous_response_id=first.id)
    client: Any = resident.openai.responses.input_items
    for order, expected in (("asc", range(5)), ("desc", range(4, -1, -1))):
        found: list[Any] = list(client.list(response.id, limit=2, order=order))
        texts = [item.content[0].text for item in found]
        assert texts == [f"message {number}" for number in expected]
        assert len({item.id for item in found}) == 5
    page = client.list(response.id)
    assert page.data[0].content[0].text == "message 4"
    assert page.has_more is False
    (earlier,) = client.list(first.id).data
    assert (earlier.type, earlier.role) == ("message", "user")
    answer = resident.http.get(f"/v1/responses/{response.id}/input_items?after=msg_none")
    check_envelope(answer, "invalid_parameter", "after")


def test_a_deleted_response_is_gone_and_cannot_be_continued(
    resident: Caller, server: ServerUnderTest
) -> None:
    first = ask(resident, input="a", store=True)
    second = ask(resident, input="b", store=True, previous_response_id=first.id)
    answer = resident.http.delete(f"/v1/responses/{first.id}")
    assert answer.json() == {"id": first.id, "deleted": True, "object": "response"}
    assert first.id not in stored_rows(server, resident)
    with pytest.raises(openai.NotFoundError):
        resident.openai.responses.delete(first.id)
    assert resident.openai.responses.retrieve(second.id) == second
    for gone in (first.id, second.id):
        with pytest.raises(openai.NotFoundError) as refused:
            ask(resident, previous_response_id=gone)
        assert refused.value.code == "response_not_found"
    database = server.database
    with database.transaction(resident.tenant_id, read_only=True) as session:
        entries = session.scalars(select(AuditEntry).order_by(AuditEntry.number)).all()
    database.close()
    assert (entries[-1].action, entries[-1].resource) == ("response.delete", first.id)


def test_a_failed_response_is_not_stored(resident: Caller, server: ServerUnderTest) -> None:
    before = stored_rows(server, resident).keys()
    options = {"ignore_eos": True, "deadline_ms": 60}
    body = {**ASK, "max_output_tokens": 400, "store": True}
    with pytest.raises(openai.APIError) as failed:
        resident.openai.responses.create(**body, extra_body=options)
    assert failed.value.code == "deadline_exceeded"
    with pytest.raises(openai.APIError) as failed:
        for _ in resident.openai.responses.create(**body, stream=True, extra_body=options):
            pass
    assert failed.value.code == "deadline_exceeded"
    assert stored_rows(server, resident).keys() == before


def add_row(server: ServerUnderTest, caller: Caller, response_id: str, size_bytes: int = 4) -> None:
    database, now = server.database, utc_now()
    with database.transaction(caller.tenant_id) as session:
        row = StoredResponse(
            id=response_id,
            size_bytes=size_bytes,
            expires_at=now + timedelta(days=1),
            input=b"[]",
            response=b"{}",
        )
        session.add(row)
    database.close()


def test_a_tenant_without_room_is_refused_before_anything_is_generated(
    server: ServerUnderTest, resident: Caller
) -> None:
    add_row(server, resident, "resp_large", size_bytes=1 << 30)
    try:
        answer = resident.http.post("/v1/responses", json={**ASK, "store": True})
        check_envelope(answer, "quota_exceeded")
        assert server.usage_of(answer.headers["x-request-id"], resident) is None
        assert ask(resident).store is False
    finally:
        resident.http.delete("/v1/responses/resp_large").raise_for_status()
    assert ask(resident, store=True).store is True


def test_a_stream_whose_response_cannot_be_stored_ends_with_an_error(
    server: ServerUnderTest, resident: Caller
) -> None:
    events: list[Any] = []

    def read() -> None:
        for event in ask(resident, store=True, stream=True, max_output_tokens=300):
            events.append(event)
            if event.type == "response.created":
                add_row(server, resident, event.response.id)  # a second one of this id is refused

    with pytest.raises(openai.APIError) as failed:
        read()
    assert failed.value.code == "internal_error"
    assert events[-1].type == "response.output_item.done"


def test_a_call_that_was_cut_cannot_be_continued(resident: Caller) -> None:
    pytest.importorskip("llguidance", reason="grammars need llguidance")
    tool: Any = {
        "type": "function",
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "minLength": 200}},
            "required": ["a"],
        },
    }
    body = {**ASK, "tools": [tool], "tool_choice": "required", "max_output_tokens": 50}
    first = resident.openai.responses.create(**body, store=True, extra_body={"seed": 5})
    assert (first.status, first.output[0].type) == ("incomplete", "function_call")
    again = {"model": "bot", "input": "x", "previous_response_id": first.id}
    answer = resident.http.post("/v1/responses", json=again)
    check_envelope(answer, "invalid_parameter", "previous_response_id")


def test_a_conversation_has_a_bounded_number_of_items(resident: Caller) -> None:
    first = ask(resident, input="a", store=True)
    items = [{"role": "user", "content": "x"}] * 2047
    body = {"model": "bot", "input": items, "previous_response_id": first.id}
    answer = resident.http.post("/v1/responses", json=body)
    check_envelope(answer, "invalid_parameter", "input")


def test_a_line_of_a_batch_continues_a_response_and_stores_none(resident: Caller) -> None:
    first = ask(resident, input="a", store=True)
    bodies = [
        {**ASK, "previous_response_id": first.id, **GO_ON},
        {**ASK, "store": True},
    ]
    endpoint: Any = "/v1/responses"
    lines = [line(str(number), body, endpoint) for number, body in enumerate(bodies)]
    batch = ended(resident.openai, create(resident.openai, jsonl(lines), endpoint).id)
    (result,) = lines_of(resident.openai, batch.output_file_id)
    (error,) = lines_of(resident.openai, batch.error_file_id)
    direct = ask(resident, previous_response_id=first.id)
    assert result["response"]["body"]["output"][0]["content"][0]["text"] == direct.output_text
    assert error["response"]["body"]["error"]["param"] == "store"


def test_a_restricted_key_finds_the_responses_of_its_own_only(resident: Caller) -> None:
    def restricted() -> openai.OpenAI:
        body = {"name": "restricted", "scopes": ["infer"], "adapters": ["bot"]}
        issued = resident.http.post("/v1/keys", json=body).raise_for_status()
        return resident.openai.with_options(api_key=issued.json()["key"])

    one, other = restricted(), restricted()
    own = one.responses.create(**ASK, store=True)
    foreign = ask(resident, store=True)
    for client in (one, resident.openai):
        assert client.responses.retrieve(own.id) == own
    for client, hidden in ((one, foreign.id), (other, own.id)):
        responses = client.responses
        for refused in (responses.retrieve, responses.delete, responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="There is no response"):
                refused(hidden)
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            responses.create(**ASK, previous_response_id=hidden)
