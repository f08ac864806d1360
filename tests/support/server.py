"""A real server for tests: a separate process, a tiny base, SQLite and a local folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from openai import AsyncOpenAI, OpenAI
from sqlalchemy import delete

from loraplex.adapters.failpoints import VARIABLE
from loraplex.api.client.api_client import ApiClient
from loraplex.api.client.local_adapter import read_adapter
from loraplex.api.client.progress import Progress
from loraplex.api.client.uploads import push_adapter, wait_until_settled
from loraplex.api.settings import Settings
from loraplex.platform.accounts.models import SignInFailures
from loraplex.platform.database import Database
from loraplex.platform.keyring import Keyring
from loraplex.platform.keys.principal import OperatorRole, Scope
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.models import UsageRecord
from loraplex.platform.operators.service import OperatorService
from loraplex.platform.secrets import API_KEY_PEPPER
from loraplex.platform.tenants import service as tenants
from support.databases import database_of_server
from support.forked_engine import is_forked_engine
from support.nursery import ForkedServer, fork_server
from support.orphans import ending_with_this_process
from support.secrets_scan import leaks
from support.waiting import wait_for

LORAPLEX = (sys.executable, "-m", "loraplex")
PRODUCT_ENGINE = "loraplex.engine.process.main"
FAKE_ENGINE = "support.fake_engine"
"""An engine without a model."""
SMALL = ("--num-threads", "1", "--memory-gib", "0.5", "--host-cache-gib", "0.05")
"""Options of a server that leaves room for others on the machine."""
PATIENCE_SECONDS = 60.0
"""For an answer: the first `GET /openapi.json` builds the document, seconds on a busy machine."""
_ANNOUNCEMENT = re.compile(rb"^Serving .* at (https?://\S+)/v1\n", re.MULTILINE)


@dataclass
class Caller:
    """A tenant's key, and the ways to use it."""

    url: str
    tenant_id: str
    slug: str
    key: str

    @cached_property
    def http(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_SECONDS)

    @cached_property
    def openai(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=PATIENCE_SECONDS
        )

    @property
    def openai_async(self) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=PATIENCE_SECONDS
        )

    def push(self, folder: Path, name: str, *, aliases: list[str] | None = None) -> dict[str, Any]:
        """Push through the CLI's own code; the version, ready."""
        client = ApiClient(self.http, self.url)
        adapter = read_adapter(folder)
        pushed = push_adapter(
            client, adapter, name, aliases=aliases or [], base_id=None, progress=Progress()
        )
        return wait_until_settled(client, pushed)

    def close(self) -> None:
        self.http.close()
        self.openai.close()


@dataclass(frozen=True)
class ServerUnderTest:
    """A running server and what a test needs to look behind it."""

    url: str
    process: subprocess.Popen[bytes] | ForkedServer
    settings: Settings
    log: Path
    callers: list[Caller] = field(default_factory=list)

    def engine_pid(self) -> int:
        """The engine's process: the server's only child that is one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        (pid,) = filter(_is_engine, map(int, children.split()))
        return pid

    def is_ready(self) -> bool:
        """Whether it serves. Fails if the process has ended."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready").is_success
        return False

    def gauge(self, name: str) -> float:
        """A metric without labels as `/metrics` shows it."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(
            float(line.split()[1]) for line in lines if line.startswith(f"loraplex_{name} ")
        )

    @property
    def database(self) -> Database:
        return Database(self.settings.database_url)

    def make_caller(self, slug: str, scopes: list[Scope] | None = None) -> Caller:
        """A new tenant with a key."""
        service = ApiKeyService(Keyring(self.settings.load_secrets(), API_KEY_PEPPER))
        database = self.database
        with database.platform_transaction() as session:
            tenant_id = tenants.create_tenant(session, slug).id
        with database.transaction(tenant_id) as session:
            issued = service.issue(session, name="test", scopes=scopes or list(Scope))
        database.close()
        self.callers.append(Caller(self.url, tenant_id, slug, issued.text))
        return self.callers[-1]

    def make_operator(self, name: str, role: OperatorRole = OperatorRole.ADMIN) -> str:
        """A new operator's key."""
        service = OperatorService(Keyring(self.settings.load_secrets(), API_KEY_PEPPER))
        database = self.database
        with database.platform_transaction() as session:
            operator = service.create(session, name, role)
            issued = service.issue_key(session, operator, name="test")
        database.close()
        return issued.text

    def forget_sign_in_failures(self) -> None:
        """Nobody is locked out any more: all tests come from one address."""
        database = self.database
        with database.platform_transaction() as session:
            session.execute(delete(SignInFailures))
        database.close()

    def usage_of(self, request_id: str | None, caller: Caller) -> UsageRecord | None:
        """The ledger's row of a request."""
        database = self.database
        with database.transaction(caller.tenant_id, read_only=True) as session:
            row = session.get(UsageRecord, request_id)
        database.close()
        return row


@contextmanager
def serving(
    base: Path,
    data_dir: Path,
    *options: str,
    program: Sequence[str] | None = None,
    engine: str | None = None,
    **environment: str,
) -> Iterator[ServerUnderTest]:
    """Run `loraplex serve` over `base` until the block is left; its log is kept in `data_dir`.

    Its database is `LORAPLEX_DATABASE` of `environment`, else the folder's (`database_of_server`).
    `program` is what has the commands of `loraplex`. None: this Python's, in tests a process forked
    from a warm one (`support.nursery`). `engine` is the module that it runs as its engine process.
    None: the product's, which a forked server forks (`support.forked_engine`); PRODUCT_ENGINE takes
    3 s of CPU time more and is for tests of how it starts. FAKE_ENGINE is for tests that do not
    depend on a model's output.
    """
    launched = _launch(base, data_dir, options, program, engine, environment)
    process, settings, log, num_old_bytes = launched
    callers: list[Caller] = []
    with ending_with_this_process(process):
        try:
            url = wait_for(lambda: _announced_url(process, log, num_old_bytes), seconds=120)
            server = ServerUnderTest(url, process, settings, log, callers)
            wait_for(server.is_ready)
            yield server
        finally:
            for caller in callers:
                caller.close()
            process.terminate()
            process.wait(60)
            assert leaks(log.read_bytes()) == [], "the log holds what nobody may read there"


class _Launched(NamedTuple):
    """The process of a server that may not serve yet."""

    process: subprocess.Popen[bytes] | ForkedServer
    settings: Settings
    log: Path
    num_old_bytes: int
    """Of earlier servers in the log."""


def _launch(
    base: Path,
    data_dir: Path,
    options: Sequence[str],
    program: Sequence[str] | None,
    engine: str | None,
    environment: Mapping[str, str],
) -> _Launched:
    data_dir.mkdir(exist_ok=True)
    environment = {**database_environment(data_dir), **environment}
    settings = Settings(data_dir=data_dir, database=environment.get("LORAPLEX_DATABASE"))
    log = data_dir / "server.log"
    if engine == FAKE_ENGINE:  # it leaves files in the base's folder
        base = shutil.copytree(base, data_dir / base.name, dirs_exist_ok=True)
        options = ("--speculation", "off", *options)
    where = ["--data-dir", str(data_dir), "--port", "0"]
    log.touch()
    num_old_bytes = log.stat().st_size
    arguments = ["serve", "--model", str(base), *where, *SMALL, *options]
    process = _start(program, arguments, child_environment(**environment), log, engine)
    return _Launched(process, settings, log, num_old_bytes)


def live_until(
    point: str,
    base: Path,
    data_dir: Path,
    *options: str,
    engine: str | None = None,
    **environment: str,
) -> None:
    """Run a server that resumes what another one has left, until it is killed at this failpoint.

    It may be before it serves. The rest as in `serving`. Fails if the failpoint is not reached.
    """
    armed = {**environment, VARIABLE: point}
    process = _launch(base, data_dir, options, None, engine, armed).process
    with ending_with_this_process(process):
        assert process.wait(120) == -signal.SIGKILL, f"{point} was not reached"


def _start(
    program: Sequence[str] | None,
    arguments: list[str],
    environment: dict[str, str],
    log: Path,
    engine: str | None,
) -> subprocess.Popen[bytes] | ForkedServer:
    """A process that leads its session, its output at the end of `log`."""
    if program is None and "PYTEST_VERSION" in os.environ:
        return fork_server(arguments, environment, log, engine)
    assert engine is None, "only a forked server has another engine"
    with log.open("ab") as output:
        return subprocess.Popen(
            [*(program or LORAPLEX), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _announced_url(process: subprocess.Popen[bytes] | ForkedServer, log: Path, start: int) -> str:
    """Where it serves, once its log says so behind `start`; "" before.

    Fails if the process has ended.
    """
    assert process.poll() is None, log.read_text()[-4000:]
    found = _ANNOUNCEMENT.search(log.read_bytes(), start)
    return found[1].decode() if found else ""


def _is_engine(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return PRODUCT_ENGINE.encode() in command or is_forked_engine(pid)


def database_environment(data_dir: Path) -> dict[str, str]:
    """What says to a process on this data folder where its database is."""
    database = database_of_server(data_dir)
    return {} if database is None else {"LORAPLEX_DATABASE": database}


def server_settings(data_dir: Path) -> Settings:
    """The settings of a server with this data folder."""
    return Settings(data_dir=data_dir, database=database_of_server(data_dir))


def child_environment(**changes: str) -> dict[str, str]:
    """Our environment for a process that imports from where we do."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
