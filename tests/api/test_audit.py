"""Every change over the API is in the audit log of its tenant or of the platform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from loraplex.api.cli.audit import app as audit_command
from loraplex.api.cli.exit_codes import CommandFailed
from loraplex.platform.keys.principal import OperatorRole
from support.server import Caller, ServerUnderTest


def audit(caller: Caller, **query: Any) -> list[dict[str, Any]]:
    answer = caller.http.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    entries: list[dict[str, Any]] = answer.json()["data"]
    return entries


def operator(server: ServerUnderTest, role: OperatorRole = OperatorRole.ADMIN) -> httpx.Client:
    key = server.make_operator(f"auditor-{role}-{len(server.callers)}", role)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


def test_what_is_done_to_an_adapter_is_written_down(caller: Caller, adapters: list[Path]) -> None:
    caller.push(adapters[0], "bot", aliases=["prod"])
    bot = "/v1/adapters/bot"
    http = caller.http
    http.put(f"{bot}/aliases/beta", json={"version": 1}).raise_for_status()
    http.post(f"{bot}/aliases/beta/rollback")  # had no earlier target: changes nothing
    http.delete(f"{bot}/aliases/beta").raise_for_status()
    http.put(f"{bot}/versions/1/pin", json={"ttl_seconds": 60}).raise_for_status()
    http.delete(f"{bot}/versions/1/pin").raise_for_status()
    http.delete(f"{bot}/versions/1/pin").raise_for_status()  # again: changes nothing
    http.post(f"{bot}/versions/1/prefetch", json={}).raise_for_status()
    last = http.delete(bot, params={"drain_seconds": 0})
    last.raise_for_status()

    entries = audit(caller)
    assert [(entry["action"], entry["resource"]) for entry in reversed(entries)] == [
        ("version.create", "bot@1"),
        ("version.ready", "bot@1"),
        ("alias.set", "bot@beta"),
        ("alias.remove", "bot@beta"),
        ("version.pin", "bot@1"),
        ("version.unpin", "bot@1"),
        ("version.prefetch", "bot@1"),
        ("adapter.delete", "bot"),
    ]
    deletion, attestation = entries[0], entries[-2]
    assert deletion["details"] == {"versions": [1]}
    assert deletion["request_id"] == last.headers["x-request-id"]
    assert deletion["actor"]["kind"] == "key"
    assert deletion["actor"]["id"] in caller.key
    assert deletion["address"] == "127.0.0.1"
    assert attestation["actor"]["kind"] == "system"
    assert attestation["details"] == {"aliases": ["prod"]}


@pytest.fixture(scope="module")
def busy(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    """A tenant with entries 1 to 5 in its log."""
    caller = server.make_caller("audited")
    caller.push(adapters[0], "bot")
    for alias in ("a", "b", "c"):
        caller.http.put(f"/v1/adapters/bot/aliases/{alias}", json={"version": 1})
    return caller


def test_the_log_is_given_in_pages(busy: Caller) -> None:
    first = busy.http.get("/v1/audit", params={"limit": 2}).json()
    assert [entry["number"] for entry in first["data"]] == [5, 4]
    assert (first["has_more"], first["next_after"]) == (True, "4")
    rest = busy.http.get("/v1/audit", params={"limit": 9, "after": first["next_after"]}).json()
    assert [entry["number"] for entry in rest["data"]] == [3, 2, 1]
    assert (rest["has_more"], rest["next_after"]) == (False, None)
    assert [entry["number"] for entry in audit(busy, oldest_first=True, limit=2)] == [1, 2]


def test_the_log_is_filtered(busy: Caller) -> None:
    assert [entry["number"] for entry in audit(busy, action="alias")] == [5, 4, 3]
    assert [entry["number"] for entry in audit(busy, actor="system")] == [2]
    assert [entry["number"] for entry in audit(busy, resource="bot@b")] == [4]
    moment = audit(busy, resource="bot@b")[0]["at"]
    assert [entry["number"] for entry in audit(busy, since=moment)] == [5, 4]
    assert [entry["number"] for entry in audit(busy, until=moment)] == [3, 2, 1]


@pytest.mark.parametrize(
    "query",
    [
        {"after": "x"},
        {"after": "-1"},
        {"since": "yesterday"},
        {"since": "2026-01-01T00:00:00"},
        {"actor": "a\0b"},
        {"limit": "0"},
    ],
)
def test_what_the_query_cannot_mean_is_refused(busy: Caller, query: dict[str, str]) -> None:
    answer = busy.http.get("/v1/audit", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_parameter"


def test_operators_see_the_platforms_log_and_verify_any(
    server: ServerUnderTest, busy: Caller
) -> None:
    with operator(server) as http:
        slug = f"made-by-operator-{len(server.callers)}"
        http.post("/admin/tenants", json={"slug": slug}).raise_for_status()
        newest = http.get("/admin/audit", params={"limit": 1}).json()["data"][0]
        assert (newest["action"], newest["resource"]) == ("tenant.create", slug)
        assert newest["actor"]["kind"] == "operator"
        seen = http.get("/v1/audit", headers={"x-loraplex-tenant": busy.slug}).json()
        assert [entry["number"] for entry in seen["data"]] == [5, 4, 3, 2, 1]
        verification = "/admin/audit/verification"
        whole = http.get(verification, params={"tenant": busy.slug}).json()
        assert whole == {
            "chain": busy.slug,
            "is_intact": True,
            "is_finished": True,
            "last_number": 5,
            "breach": None,
        }
        part = http.get(verification, params={"tenant": busy.slug, "limit": 2}).json()
        assert (part["is_finished"], part["last_number"]) == (False, 2)
        assert http.get(verification).json()["is_intact"]
        missing = http.get(verification, params={"tenant": "nobody"})
        assert missing.json()["error"]["code"] == "tenant_not_found"


def test_the_command_lists_exports_and_verifies(
    server: ServerUnderTest, busy: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", server.url)
    monkeypatch.setenv("LORAPLEX_API_KEY", busy.key)
    monkeypatch.setenv("LORAPLEX_DATABASE", server.settings.database_url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run = CliRunner().invoke
    listed = run(audit_command, ["list", "--limit", "2", "--json"])
    assert [entry["number"] for entry in json.loads(listed.stdout)] == [5, 4]
    table = run(audit_command, ["list", "--action", "alias"])
    assert "bot@b" in table.stdout
    exported = run(audit_command, ["export"]).stdout.splitlines()
    assert [json.loads(line)["number"] for line in exported] == [1, 2, 3, 4, 5]
    where = ["--data-dir", str(server.settings.data_dir), "--tenant", busy.slug, "--json"]
    ends = ["--checkpoint", str(tmp_path / "ends.json")]
    verified = run(audit_command, ["verify", *where, *ends])
    assert verified.exit_code == 0, verified.output
    row = {"log": busy.slug, "entries": 5, "broken_at": None, "reason": None}
    assert json.loads(verified.stdout) == [row]
    kept = json.loads((tmp_path / "ends.json").read_text())
    (tmp_path / "ends.json").write_text(json.dumps({chain: [5, "00"] for chain in kept}))
    broken = run(audit_command, ["verify", *where, *ends])
    assert isinstance(broken.exception, CommandFailed)
    assert json.loads(broken.stdout)[0]["broken_at"] == 5
