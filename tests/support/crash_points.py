"""Servers killed at each failpoint, and a check of the result.

The client records what was acknowledged. After the kill another server recovers, the client repeats
its requests as any client does, one garbage collection runs, and the checker compares the record
with the database, the store and the staged files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from sqlalchemy import create_engine

from loraplex.adapters.failpoints import FAILPOINTS, VARIABLE
from loraplex.api.client import uploads
from loraplex.api.client.errors import ClientError
from support.models import make_adapter, make_tiny_llama
from support.server import (
    LORAPLEX,
    Caller,
    ServerUnderTest,
    child_environment,
    database_environment,
    server_settings,
    serving,
)
from support.waiting import wait_for

NAME = "bot"
SECONDS = 120
STRAY_OBJECT = "a" * 64 + ".block"


@dataclass
class Ledger:
    """What the server has acknowledged to the client."""

    lost: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    tried: int = 0


@dataclass
class Trial:
    """One failpoint on an installation of its own."""

    point: str
    base: Path
    adapter: Path
    data_dir: Path
    ledger: Ledger
    acknowledged: dict[str, Any] | None = None
    """The version whose readiness the client was told."""
    was_deletion_asked: bool = False
    key: str = ""
    tenant_id: str = ""

    @property
    def family(self) -> str:
        return self.point.partition(".")[0]

    def run(self) -> None:
        """Crash, recover, collect, check."""
        self.ledger.tried += 1
        if self.family == "garbage":
            self._crash_collection()
        else:
            self._crash_server()
        with serving(self.base, self.data_dir) as server:
            self._check_recovered(self._again(server))
            self._collect_garbage()
            self._check_orphans()

    # --- the crash --------------------------------------------------------------------------------

    def _crash_server(self) -> None:
        # Modules read the variable when they are imported, so the process must import them.
        failing = {VARIABLE: self.point}
        with serving(self.base, self.data_dir, program=LORAPLEX, **failing) as server:
            caller = self._introduce(server)
            hasty = patch.object(
                uploads, "FIRST_PAUSE_SECONDS", 0.01
            )  # nobody comes back to wait for
            with hasty, suppress(ClientError, httpx.TransportError, AssertionError):
                self.acknowledged = caller.push(self.adapter, NAME)
                self.was_deletion_asked = True
                caller.http.delete(f"/v1/adapters/{NAME}", params={"drain_seconds": 0})
            wait_for(lambda: server.process.poll() is not None, seconds=SECONDS)
            assert server.process.returncode == -9, f"{self.point} was not reached"

    def _crash_collection(self) -> None:
        with serving(self.base, self.data_dir) as server:
            caller = self._introduce(server)
            self.acknowledged = caller.push(self.adapter, NAME)
            stray = self.data_dir / "store" / "t" / caller.tenant_id / "a" / STRAY_OBJECT
            stray.write_bytes(b"of a push that never ended")
        assert self._gc(**{VARIABLE: self.point}).returncode == -9, f"{self.point} was not reached"

    def _introduce(self, server: ServerUnderTest) -> Caller:
        caller = server.make_caller("acme")
        self.key, self.tenant_id = caller.key, caller.tenant_id
        return caller

    def _again(self, server: ServerUnderTest) -> Caller:
        caller = Caller(server.url, self.tenant_id, "acme", self.key)
        server.callers.append(caller)
        return caller

    # --- the recovery -----------------------------------------------------------------------------

    def _check_recovered(self, caller: Caller) -> None:
        if self.was_deletion_asked:
            self._check_deleted(caller)
        elif self.acknowledged is not None:
            self._check_kept(caller, self.acknowledged)
        else:
            self._check_retried(caller)

    def _check_kept(self, caller: Caller, version: dict[str, Any]) -> None:
        answer = caller.http.get(f"/v1/adapters/{NAME}/versions/{version['version']}")
        if not answer.is_success or answer.json()["state"] != "ready":
            self.ledger.lost.append(f"{self.point}: an acknowledged version")
        else:
            self._check_answers(caller, version["digest"])

    def _check_retried(self, caller: Caller) -> None:
        """The same push again ends with one version, whatever of the first one was left."""
        version = caller.push(self.adapter, NAME)
        adapter = caller.http.get(f"/v1/adapters/{NAME}").json()
        if [entry["version"] for entry in adapter["versions"]] != [1]:
            self.ledger.orphans.append(f"{self.point}: versions {adapter['versions']}")
        self._check_answers(caller, version["digest"])

    def _check_answers(self, caller: Caller, digest: str) -> None:
        body = {"model": NAME, "prompt": "Hello", "max_tokens": 2}
        answer = caller.http.post("/v1/completions", json=body)
        if not answer.is_success or answer.headers["x-loraplex-digest"] != digest:
            self.ledger.lost.append(f"{self.point}: it answers {answer.status_code}")

    def _check_deleted(self, caller: Caller) -> None:
        """A deletion that was begun has ended, by itself or asked for again."""

        def is_settled() -> bool:
            states = _version_states(self.data_dir)
            return set(states) <= {"deleted", "ready"}

        wait_for(is_settled, seconds=SECONDS)
        if "ready" in _version_states(self.data_dir):  # the crash came before its first effect
            assert caller.http.delete(f"/v1/adapters/{NAME}").is_success
        if caller.http.get(f"/v1/adapters/{NAME}").status_code != 404:
            self.ledger.lost.append(f"{self.point}: a deletion")

    # --- what is left -----------------------------------------------------------------------------

    def _collect_garbage(self) -> None:
        ended = self._gc()
        assert ended.returncode == 0, ended.stderr
        json.loads(ended.stdout)

    def _gc(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LORAPLEX, "gc", "--grace-hours", "0", "--json", "--data-dir", str(self.data_dir)],
            env=child_environment(**database_environment(self.data_dir), **environment),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def _check_orphans(self) -> None:
        objects = {path.stem for path in (self.data_dir / "store" / "t").rglob("*.block")}
        named = _named_digests(self.data_dir)
        for stem in objects - named:
            self.ledger.orphans.append(f"{self.point}: object {stem}")
        for stem in named - objects:
            self.ledger.lost.append(f"{self.point}: the object {stem} of a version")
        for path in (self.data_dir / "uploads").iterdir():
            self.ledger.orphans.append(f"{self.point}: file {path.name}")
        for upload_id in _unfinished_uploads(self.data_dir):
            self.ledger.orphans.append(f"{self.point}: upload {upload_id}")


def run_crash_points(
    times: int = 1, *, points: Iterable[str] = FAILPOINTS, directory: Path | None = None
) -> dict[str, int]:
    """Crash at each of `points` so many times: `{"tried", "lost", "orphans"}`; details are printed
    to standard error."""
    ledger = Ledger()
    with tempfile.TemporaryDirectory(dir=directory) as home:
        base = make_tiny_llama(Path(home) / "base")
        adapter = make_adapter(base, Path(home) / "adapter", seed=1)
        for turn in range(times):
            for point in points:
                data_dir = Path(home) / f"{turn}-{point}"
                Trial(point, base, adapter, data_dir, ledger).run()
    _explain(ledger)
    return {"tried": ledger.tried, "lost": len(ledger.lost), "orphans": len(ledger.orphans)}


def _query(data_dir: Path, sql: str) -> set[str]:
    """The first column, read past the product's own code."""
    engine = create_engine(server_settings(data_dir).database_url)
    with engine.connect() as connection:
        found = {row[0] for row in connection.exec_driver_sql(sql)}
    engine.dispose()
    return found


def _version_states(data_dir: Path) -> set[str]:
    return _query(data_dir, "SELECT state FROM adapter_versions")


def _named_digests(data_dir: Path) -> set[str]:
    named = _query(data_dir, "SELECT digest FROM adapter_versions WHERE state != 'deleted'")
    return {digest.removeprefix("sha256:") for digest in named}


def _unfinished_uploads(data_dir: Path) -> set[str]:
    return _query(data_dir, "SELECT id FROM uploads WHERE state IN ('receiving', 'validating')")


def _explain(ledger: Ledger) -> None:
    for line in (*ledger.lost, *ledger.orphans):
        sys.stderr.write(f"{line}\n")
