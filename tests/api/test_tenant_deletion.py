"""`DELETE /admin/tenants/{slug}`: everything of the tenant goes, also over kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from loraplex.adapters.failpoints import TENANT_FAILPOINTS, VARIABLE
from loraplex.platform.base import Base
from loraplex.platform.models import UsageRecord
from loraplex.platform.tenants.deletion import LEDGER
from support.batches import completions, create, jsonl
from support.command import Command
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest, live_until, serving
from support.waiting import wait_for

pytestmark = pytest.mark.slow


def as_operator(server: ServerUnderTest, name: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {server.make_operator(name)}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


def use_everything(caller: Caller, folder: Path) -> None:
    """Leave something of each kind with the server."""
    caller.push(folder, "bot", aliases=["prod"])
    caller.openai.completions.create(model="bot@prod", prompt="hello", max_tokens=2)
    caller.openai.responses.create(model="bot", input="hello", max_output_tokens=16, store=True)
    create(caller.openai, jsonl(completions("bot", ["hello"])))
    users = caller.http.post("/v1/users", json={"email": "ada@acme.example", "role": "developer"})
    caller.http.put(
        f"/v1/users/{users.json()['id']}/limits", json={"requests_per_minute": 1000}
    ).raise_for_status()


def finished(http: httpx.Client, deletion_id: str) -> dict[str, Any]:
    path = f"/admin/tenant-deletions/{deletion_id}"

    def receipt() -> Any:
        view = http.get(path).raise_for_status().json()
        return view if view["finished_at"] else None

    found: dict[str, Any] = wait_for(receipt, seconds=120)
    return found


def rows_left(server: ServerUnderTest, tenant_id: str) -> dict[str, int]:
    database = server.database
    with database.platform_transaction(read_only=True) as session:
        counted = {
            table.name: session.scalar(
                select(func.count()).select_from(table).where(table.c.tenant_id == tenant_id)
            )
            for table in Base.metadata.sorted_tables
            if "tenant_id" in table.columns
        }
    database.close()
    return {name: count for name, count in counted.items() if count}


def objects_left(server: ServerUnderTest, tenant_id: str) -> list[str]:
    folder = server.settings.data_dir / "store" / "t" / tenant_id
    return [name for _, _, names in os.walk(folder) for name in names]


def check_gone(server: ServerUnderTest, caller: Caller, http: httpx.Client) -> None:
    """Neither the database, the store nor a tier has anything of the tenant but its usage."""
    assert rows_left(server, caller.tenant_id).keys() <= LEDGER
    assert objects_left(server, caller.tenant_id) == []
    memory = http.get("/admin/memory").raise_for_status().text
    assert caller.tenant_id not in memory
    assert caller.slug not in memory
    check_envelope(http.get(f"/admin/tenants/{caller.slug}"), "tenant_not_found")
    check_envelope(caller.http.get("/v1/me"), "invalid_api_key")


def test_a_tenant_is_deleted_as_a_whole_and_its_neighbour_is_untouched(
    server: ServerUnderTest, adapters: list[Path]
) -> None:
    caller, neighbour = server.make_caller("leaving"), server.make_caller("stays-behind")
    neighbour.push(adapters[0], "bot")
    use_everything(caller, adapters[0])
    num_own = len(objects_left(server, neighbour.tenant_id))
    with as_operator(server, "remover") as http:
        path = "/admin/tenants/leaving"
        check_envelope(http.delete(path), "invalid_parameter", "confirm")
        wrong = http.delete(path, params={"confirm": "Leaving"})
        check_envelope(wrong, "invalid_parameter", "confirm")
        begun = http.delete(path, params={"confirm": "leaving"})
        assert begun.status_code == 202, begun.text
        check_envelope(caller.http.get("/v1/me"), "tenant_suspended")
        check_envelope(http.get(path), "tenant_not_found")
        check_envelope(http.post("/admin/tenants", json={"slug": "leaving"}), "tenant_exists")
        acting = {"x-loraplex-tenant": "leaving"}
        check_envelope(http.get("/v1/adapters", headers=acting), "tenant_not_found")
        again = http.delete(path, params={"confirm": "leaving", "with_usage": True})
        assert (again.status_code, again.json()["id"]) == (202, caller.tenant_id)
        assert again.json()["with_usage"] is False
        deletion = finished(http, caller.tenant_id)
        rows = deletion["rows"]
        assert (rows["deletion_receipts"], rows["users"], rows["responses"]) == (1, 1, 1)
        assert deletion["objects"]["number"] >= 1, "the batch's file"
        check_gone(server, caller, http)
        check_envelope(http.delete(path, params={"confirm": "leaving"}), "tenant_not_found")
        audited = http.get("/admin/audit", params={"action": "tenant.erase"}).json()["data"]
        assert "leaving" in {entry["resource"] for entry in audited}
    check_usage_is_anonymous(server, caller.tenant_id)
    assert len(objects_left(server, neighbour.tenant_id)) == num_own
    answer = neighbour.openai.completions.create(model="bot", prompt="hello", max_tokens=2)
    assert answer.choices[0].text


def check_usage_is_anonymous(server: ServerUnderTest, tenant_id: str) -> None:
    database = server.database
    with database.platform_transaction(read_only=True) as session:
        query = select(UsageRecord).where(UsageRecord.tenant_id == tenant_id)
        records = session.scalars(query).all()
    database.close()
    assert records
    assert {(record.key_id, record.user_id) for record in records} == {(None, None)}


def test_the_command_asks_for_the_name_and_prints_the_receipt(
    server: ServerUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caller = server.make_caller("leaving-by-command")
    caller.openai.completions.create(model="tiny", prompt="hello", max_tokens=2)
    caller.key = server.make_operator("commanding-remover")
    run = Command(monkeypatch, capsys, caller, "tenants")
    code, _, err = run("delete", caller.slug)
    assert (code, f"--confirm {caller.slug}" in err) == (2, True)
    code, _, err = run("delete", caller.slug, "--confirm", "another")
    assert code != 0
    assert "confirm" in err
    deletion = run.ask("delete", caller.slug, "--confirm", caller.slug, "--with-usage")
    assert (deletion["slug"], deletion["with_usage"]) == (caller.slug, True)
    assert deletion["rows"]["usage_records"] == 1
    assert rows_left(server, caller.tenant_id) == {}
    assert run("show", caller.slug)[0] != 0


def test_a_deletion_that_is_killed_after_each_step_ends_and_loses_nothing_of_others(
    tiny_base: Path, tmp_path: Path, adapters: list[Path]
) -> None:
    """Each start of the server resumes it, comes to the next failpoint, and is killed there."""
    hidden, *later = TENANT_FAILPOINTS
    with serving(tiny_base, tmp_path, **{VARIABLE: hidden}) as server:
        caller, neighbour = server.make_caller("acme"), server.make_caller("bolt")
        neighbour.push(adapters[1], "bot")
        use_everything(caller, adapters[0])
        with as_operator(server, "root") as http:
            with pytest.raises(httpx.TransportError):
                http.delete("/admin/tenants/acme", params={"confirm": "acme"})
            assert server.process.wait(60) == -signal.SIGKILL
            headers = dict(http.headers)
    for point in later:
        live_until(point, tiny_base, tmp_path)
    with serving(tiny_base, tmp_path) as server:
        with httpx.Client(base_url=server.url, headers=headers) as http:
            rows = finished(http, caller.tenant_id)["rows"]
            assert (rows["users"], rows["responses"], rows["api_keys"]) == (1, 1, 1)
            gone = Caller(server.url, caller.tenant_id, "acme", caller.key)
            stays = Caller(server.url, neighbour.tenant_id, "bolt", neighbour.key)
            server.callers.extend((gone, stays))
            check_gone(server, gone, http)
        check_usage_is_anonymous(server, caller.tenant_id)
        answer = stays.openai.completions.create(model="bot", prompt="hello", max_tokens=2)
        assert answer.choices[0].text
