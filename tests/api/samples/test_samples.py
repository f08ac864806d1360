"""Samples of requests through the API: which are kept, who reads them, and what erases them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from loraplex.api.evaluation.golden_set import GoldenSet
from loraplex.engine.tuning.lines import Conversation, read_example
from loraplex.platform.base import utc_now
from loraplex.platform.keys.principal import Scope
from loraplex.platform.models import Sample
from support.batches import completions, create, ended, jsonl
from support.browser import signed_in_user
from support.envelopes import check_envelope
from support.samples import add_sample, new_sample, sample_all, samples_of, write_samples
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

GO_ON: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi, zebra"}], **GO_ON}


@pytest.fixture
def owner(make_caller: Callable[[], Caller], adapters: list[Path]) -> Iterator[Caller]:
    """A tenant whose adapter `bot` is sampled as a whole."""
    caller = make_caller()
    caller.push(adapters[0], "bot", aliases=["prod"])
    sample_all(caller, "bot")
    yield caller
    caller.close()


def ask(caller: Caller, path: str = "/v1/chat/completions", **body: Any) -> Any:
    answer = caller.http.post(path, json={"model": "bot", **(body or CHAT)})
    assert answer.is_success, answer.text
    return answer.json()


def read(caller: Caller, sample_id: str) -> Any:
    answer = caller.http.get(f"/v1/adapters/bot/samples/{sample_id}")
    assert answer.is_success, answer.text
    return answer.json()


def actions(caller: Caller, prefix: str) -> list[dict[str, Any]]:
    """The audit log's entries, the newest first."""
    entries = caller.http.get("/v1/audit?limit=100").json()["data"]
    return [entry for entry in entries if entry["action"].startswith(prefix)]


def test_a_chat_is_kept_as_it_was_asked_and_answered(owner: Caller) -> None:
    answer = ask(owner)
    (listed,) = samples_of(owner, "bot")
    assert "Hi, zebra" not in json.dumps(listed)
    sample = read(owner, listed["id"])
    assert sample["messages"] == CHAT["messages"]
    said = answer["choices"][0]["message"]["content"]
    assert sample["answer"] == {"role": "assistant", "content": said}
    assert (sample["kind"], sample["version"], sample["finish_reason"]) == ("chat", 1, "length")
    usage = answer["usage"]
    assert sample["prompt_tokens"] == usage["prompt_tokens"]
    assert sample["completion_tokens"] == usage["completion_tokens"]
    assert answer["id"] == f"chatcmpl-{sample['request_id']}"
    assert listed.items() <= sample.items()
    (entry,) = actions(owner, "sample.")
    assert (entry["action"], entry["resource"]) == ("sample.read", listed["id"])


@pytest.mark.slow
def test_every_api_of_chats_and_completions_is_sampled_streamed_or_not(owner: Caller) -> None:
    prompt = "Hi, zebra"
    for is_stream in (False, True):
        ask_raw(owner, "/v1/chat/completions", {**CHAT, "stream": is_stream})
        ask_raw(owner, "/v1/messages", {**CHAT, "stream": is_stream})
        responses = {"input": prompt, "max_output_tokens": 4, "ignore_eos": True, "temperature": 0}
        ask_raw(owner, "/v1/responses", {**responses, "stream": is_stream})
        ask_raw(owner, "/v1/completions", {"prompt": prompt, **GO_ON, "stream": is_stream})
    samples = [read(owner, each["id"]) for each in samples_of(owner, "bot")]
    chats = [each for each in samples if each["kind"] == "chat"]
    assert [each["messages"] for each in chats] == 6 * [CHAT["messages"]]
    assert len({each["answer"]["content"] for each in chats}) == 1
    plain = [each for each in samples if each["kind"] == "completion"]
    assert [each["prompt"] for each in plain] == 2 * [prompt]
    said = ask(owner, "/v1/completions", prompt=prompt, **GO_ON)["choices"][0]["text"]
    assert {each["completion"] for each in plain} == {said}


def ask_raw(caller: Caller, path: str, body: dict[str, Any]) -> None:
    """Ask and read everything, a stream or not."""
    answer = caller.http.post(path, json={"model": "bot", **body})
    assert answer.is_success, answer.text


NOT_KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "store-false-chat": ("/v1/chat/completions", {**CHAT, "store": False}),
    "store-false-completion": ("/v1/completions", {"prompt": "x", **GO_ON, "store": False}),
    "store-false-response": (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 2, "store": False},
    ),
    "several-choices": ("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1}),
    "several-prompts": ("/v1/completions", {"prompt": ["x", "y"], **GO_ON}),
    "best-of": ("/v1/completions", {"prompt": "x", **GO_ON, "temperature": 1, "best_of": 2}),
    "token-ids": ("/v1/completions", {"prompt": [5, 6], **GO_ON}),
    "cut-prompt": ("/v1/completions", {"prompt": "x", **GO_ON, "truncate_prompt_tokens": 1}),
    "continued-message": (
        "/v1/chat/completions",
        {
            "messages": [*CHAT["messages"], {"role": "assistant", "content": "Well"}],
            "continue_final_message": True,
            **GO_ON,
        },
    ),
    "embedding": ("/v1/embeddings", {"input": "x"}),
    "composition": (
        "/v1/completions",
        {
            **{"prompt": "x", "model": "tiny", **GO_ON},
            "adapters": [{"model": "bot", "weight": 0.5}],
        },
    ),
    "base": ("/v1/completions", {"prompt": "x", **GO_ON, "model": "tiny"}),
}


@pytest.mark.slow
def test_requests_that_cannot_be_examples_are_not_kept(owner: Caller) -> None:
    for path, body in NOT_KEPT.values():
        ask_raw(owner, path, body)
    refused = owner.http.post("/v1/chat/completions", json={"model": "bot", "messages": []})
    assert refused.is_client_error
    batch = create(owner.openai, jsonl(completions("bot", ["in a batch"])))
    assert ended(owner.openai, batch.id).status == "completed"
    assert samples_of(owner, "bot") == []
    add_sample(owner, "bot")
    assert len(samples_of(owner, "bot")) == 1, "another request would have been"


def test_an_answer_that_was_broken_off_is_not_kept(owner: Caller) -> None:
    body = {"model": "bot", **CHAT, "max_tokens": 500, "stream": True}
    with owner.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        request_id = answer.headers["x-request-id"]
        next(answer.iter_lines())
    wait_for(lambda: owner.http.get(f"/v1/requests/{request_id}").is_success)
    assert samples_of(owner, "bot") == []


def test_nothing_is_kept_before_the_opt_in_and_after_it_ends(
    make_caller: Callable[[], Caller], adapters: list[Path]
) -> None:
    caller = make_caller()
    caller.push(adapters[0], "bot")
    off = caller.http.get("/v1/adapters/bot/sampling").json()
    assert (off["enabled"], off["percent"], off["samples"], off["max_days"]) == (False, None, 0, 30)
    ask(caller)
    sample_all(caller, "bot", days=5)
    ask(caller)
    on = caller.http.get("/v1/adapters/bot/sampling").json()
    assert (on["enabled"], on["percent"], on["days"], on["samples"]) == (True, 100.0, 5, 1)
    for _ in range(2):
        assert caller.http.delete("/v1/adapters/bot/sampling").status_code == 204
    ask(caller)
    assert len(samples_of(caller, "bot")) == 1
    assert [entry["action"] for entry in actions(caller, "sampling.")] == [
        "sampling.remove",
        "sampling.set",
    ]
    assert actions(caller, "sampling.set")[0]["details"] == {"percent": 100.0, "days": 5}
    body = {"percent": 100, "days": 31}
    refused = caller.http.put("/v1/adapters/bot/sampling", json=body)
    check_envelope(refused, "invalid_parameter", "days")


def test_a_deletion_erases_all_samples_and_is_its_own_receipt(
    owner: Caller, server: ServerUnderTest
) -> None:
    for _ in range(3):
        ask(owner)
    first, *_ = samples_of(owner, "bot")
    path = f"/v1/adapters/bot/samples/{first['id']}"
    assert owner.http.delete(path).status_code == 204
    check_envelope(owner.http.get(path), "sample_not_found")
    receipt = owner.http.delete("/v1/adapters/bot/samples").json()
    assert (receipt["adapter"], receipt["samples"]) == ("bot", 2)
    assert samples_of(owner, "bot") == []
    assert rows_of(server, owner) == []
    told = [entry["details"]["samples"] for entry in actions(owner, "sample.delete")]
    assert told == [2, 1]
    ask(owner)
    assert len(samples_of(owner, "bot")) == 1, "sampling goes on"


def test_a_deleted_adapter_leaves_no_samples_and_its_receipt_tells_how_many_there_were(
    owner: Caller, server: ServerUnderTest, adapters: list[Path]
) -> None:
    ask(owner)
    ask(owner)
    assert len(samples_of(owner, "bot")) == 2
    (deleted,) = owner.http.delete("/v1/adapters/bot").json()["versions"]
    assert deleted["receipt"]["samples"] == 2
    assert rows_of(server, owner) == []
    owner.push(adapters[1], "bot")
    assert owner.http.get("/v1/adapters/bot/sampling").json()["enabled"] is False


def rows_of(server: ServerUnderTest, caller: Caller) -> list[Sample]:
    """The tenant's rows in the database."""
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        rows = list(session.scalars(select(Sample)))
    database.close()
    return rows


@pytest.mark.slow
def test_no_text_is_in_the_database_the_log_or_the_metrics(
    owner: Caller, server: ServerUnderTest
) -> None:
    ask(owner)
    assert len(samples_of(owner, "bot")) == 1
    (row,) = rows_of(server, owner)
    assert b"zebra" not in row.content
    assert "zebra" not in server.log.read_text()
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "zebra" not in metrics
    kept = next(line for line in metrics.splitlines() if 'samples_total{outcome="kept"}' in line)
    assert float(kept.split()[1]) >= 1


# --- who may do what --------------------------------------------------------------------------


def test_no_operator_turns_sampling_on_or_reads_samples_or_gives_itself_a_key(
    owner: Caller, server: ServerUnderTest
) -> None:
    sample_id = add_sample(owner, "bot")
    name = f"samples-operator-{owner.slug}"
    headers = {
        "authorization": f"Bearer {server.make_operator(name)}",
        "x-loraplex-tenant": owner.slug,
    }
    with httpx.Client(base_url=server.url, headers=headers) as operator:
        on = {"percent": 100, "days": 1}
        for refused in (
            operator.put("/v1/adapters/bot/sampling", json=on),
            operator.delete("/v1/adapters/bot/samples"),
            operator.get("/v1/adapters/bot/samples"),
            operator.get(f"/v1/adapters/bot/samples/{sample_id}"),
        ):
            check_envelope(refused, "insufficient_scope")
        key = {"name": "mine", "scopes": ["samples:read"]}
        check_envelope(operator.post("/v1/keys", json=key), "grant_too_wide", "scopes")
        key_id = operator.get("/v1/me").json()
        assert "samples:read" not in key_id["scopes"]
        own = next(key for key in owner.http.get("/v1/keys").json()["data"])
        rotated = operator.post(f"/v1/keys/{own['id']}/rotate", json={"overlap_seconds": 60})
        check_envelope(rotated, "grant_too_wide", "scopes")
        assert operator.get("/v1/adapters/bot/sampling").json()["samples"] == 1
        user = {"email": "owner@samples.example", "role": "owner"}
        assert operator.post("/v1/users", json=user).status_code == 201, "the first owner"


@pytest.mark.parametrize(("role", "may"), [("owner", True), ("developer", False)])
def test_of_a_tenants_users_the_owner_alone_reads_samples(
    owner: Caller, server: ServerUnderTest, role: str, may: bool
) -> None:
    sample_id = add_sample(owner, "bot")
    with signed_in_user(server, owner, role) as browser:
        answer = browser.http.get(f"/v1/adapters/bot/samples/{sample_id}")
        assert answer.status_code == (200 if may else 403)


@pytest.mark.slow
def test_a_key_of_another_adapter_does_not_see_the_samples(
    owner: Caller, adapters: list[Path]
) -> None:
    sample_id = add_sample(owner, "bot")
    scopes = [Scope.SAMPLES_READ, Scope.SAMPLES_WRITE]
    for adapter, status in (("bot", 200), ("other", 404)):
        body = {"name": adapter, "scopes": scopes, "adapters": [adapter]}
        key = owner.http.post("/v1/keys", json=body).json()["key"]
        headers = {"authorization": f"Bearer {key}"}
        path = f"/v1/adapters/bot/samples/{sample_id}"
        assert httpx.get(f"{owner.url}{path}", headers=headers).status_code == status


# --- exports ------------------------------------------------------------------------------------

WHOLE = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}


def ask_until_stop(caller: Caller, path: str, body: dict[str, Any]) -> str:
    """Ask for an answer that ends by itself: at a text that the answer has."""
    field = (lambda said: said["message"]["content"]) if "messages" in body else _text
    cut = field(ask(caller, path, **body, **WHOLE)["choices"][0])
    stop = cut[-1]
    whole = ask(caller, path, **body, **WHOLE, stop=[stop])["choices"][0]
    assert whole["finish_reason"] == "stop"
    text: str = field(whole)
    return text


def _text(said: dict[str, Any]) -> Any:
    return said["text"]


def export(caller: Caller, **body: Any) -> Any:
    answer = caller.http.post("/v1/adapters/bot/samples/export", json=body)
    assert answer.is_success, answer.text
    return answer.json()


@pytest.mark.slow
def test_whole_answers_become_training_data_that_a_job_reads(owner: Caller, tmp_path: Path) -> None:
    said = ask_until_stop(owner, "/v1/chat/completions", {"messages": CHAT["messages"]})
    file = export(owner, format="training")
    assert (file["purpose"], file["filename"]) == ("fine-tune", "bot-training.jsonl")
    content = owner.http.get(f"/v1/files/{file['id']}/content").content
    (line,) = content.splitlines()
    answer = {"role": "assistant", "content": said}
    assert json.loads(line) == {"messages": [*CHAT["messages"], answer]}
    example = read_example(line)
    assert isinstance(example, Conversation)
    assert example.trained == {1}
    (entry,) = actions(owner, "sample.")
    assert entry["action"] == "sample.export"
    assert entry["details"] == {"format": "training", "kind": "chat", "samples": 1}
    job = owner.openai.fine_tuning.jobs.create(
        model="tiny", training_file=file["id"], suffix="trained"
    )
    assert job.training_file == file["id"]
    owner.openai.fine_tuning.jobs.cancel(job.id)


@pytest.mark.slow
def test_whole_answers_become_a_golden_set_that_eval_reads(owner: Caller, tmp_path: Path) -> None:
    said = ask_until_stop(owner, "/v1/completions", {"prompt": "Once"})
    file = export(owner, format="golden", kind="completion", version=1)
    assert file["purpose"] == "evals"
    path = tmp_path / "golden.jsonl"
    path.write_bytes(owner.http.get(f"/v1/files/{file['id']}/content").content)
    (case,) = GoldenSet.read(path).cases
    assert (case.prompt, case.expected) == ("Once", said)
    whole = [each for each in samples_of(owner, "bot") if each["finish_reason"] == "stop"]
    assert case.id == whole[0]["id"]


@pytest.mark.slow
def test_an_export_takes_the_newest_over_several_pages(
    owner: Caller, server: ServerUnderTest
) -> None:
    ask(owner)
    now = utc_now()
    write_samples(
        server,
        owner,
        lambda version: [
            new_sample(version, text=str(number), at=now + timedelta(seconds=number))
            for number in range(120)
        ],
    )
    file = export(owner, format="training", limit=110)
    lines = owner.http.get(f"/v1/files/{file['id']}/content").text.splitlines()
    said = [json.loads(line)["messages"][-1]["content"] for line in lines]
    assert said == [str(number) for number in range(119, 9, -1)]


def test_an_export_of_nothing_is_refused(owner: Caller) -> None:
    ask(owner)  # cut off by max_tokens
    refused = owner.http.post("/v1/adapters/bot/samples/export", json={"format": "training"})
    check_envelope(refused, "no_samples")
    assert owner.http.get("/v1/files").json()["data"] == []


def test_who_may_not_read_samples_does_not_see_a_file_made_of_them(
    owner: Caller, server: ServerUnderTest
) -> None:
    ask_until_stop(owner, "/v1/chat/completions", {"messages": CHAT["messages"]})
    file = export(owner, format="training")
    scopes = sorted(set(Scope) - {Scope.SAMPLES_READ})
    key = owner.http.post("/v1/keys", json={"name": "other", "scopes": scopes}).json()["key"]
    operator = server.make_operator(f"files-operator-{owner.slug}")
    for headers in (
        {"authorization": f"Bearer {key}"},
        {"authorization": f"Bearer {operator}", "x-loraplex-tenant": owner.slug},
    ):
        with httpx.Client(base_url=server.url, headers=headers) as other:
            assert other.get("/v1/files").json()["data"] == []
            for path in ("", "/content"):
                refused = other.get(f"/v1/files/{file['id']}{path}")
                check_envelope(refused, "file_not_found")
            check_envelope(other.delete(f"/v1/files/{file['id']}"), "file_not_found")
            job = {"model": "tiny", "training_file": file["id"], "suffix": "trained"}
            check_envelope(other.post("/v1/fine_tuning/jobs", json=job), "file_not_found")
    assert [each["id"] for each in owner.http.get("/v1/files").json()["data"]] == [file["id"]]
