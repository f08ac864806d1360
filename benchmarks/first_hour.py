"""A new user's first hour, automated: `make first-hour`.

In a folder with a space, with relative paths: serve the demo's base behind the TLS proxy of
`deploy/compose`, create an operator, a tenant and a key, push, call, move and roll back an alias,
delete, sign in at the console with Chromium; then make the mistakes of `newcomer_mistakes`. Prints
a line per step and exits with 1 if one fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from benchmarks.newcomer import Terminal
from benchmarks.newcomer_mistakes import MISTAKES, check, prepare
from openai import OpenAI
from playwright.sync_api import expect

from loraplex.api.demo.manifest import WEIGHTS
from support.chromium import running_chromium
from support.server import free_port

CADDYFILE = Path(__file__).parents[1] / "deploy" / "compose" / "Caddyfile"
PASSWORD = "correct horse battery staple"
SMALL = ("--num-threads", "1", "--memory-gib", "0.5", "--host-cache-gib", "0.05")
PROXY_SECONDS = 30.0
NUM_TERMINALS = 2
"""Mistakes at a time: as many as cores."""


@dataclass
class FirstHour:
    """What the person has in hand."""

    terminal: Terminal
    server_url: str
    proxy_url: str
    key: str = ""
    invitation: str = ""
    """The path of the link that lets the first operator set a password."""

    def make_operator(self) -> None:
        """`loraplex operators create root | loraplex login`, without naming the data folder."""
        made = self.terminal.run("operators", "create", "root")
        assert made.exit_code == 0, made.err
        assert str(self.terminal.folder / "my data") in made.err, made.err
        link = next(word for word in made.err.split() if "/console/join" in word)
        self.invitation = link[link.index("/console/") :]
        self.terminal.must("login", "--url", self.server_url, stdin=made.out)

    def make_tenant_and_key(self) -> None:
        self.terminal.must("tenants", "create", "acme")
        self.key = self.terminal.must("keys", "create", "--tenant", "acme")

    def push(self) -> None:
        """The printed curl names the alias that was just set, and works."""
        done = self.terminal.run(
            *("adapters", "push", "sql adapter", "support-bot", "--alias", "prod"), **self.as_tenant
        )
        assert done.exit_code == 0, done.err
        start = done.err.index("curl ")
        command = done.err[start : done.err.index("or, with the openai package")]
        assert "support-bot@prod" in command
        answered = subprocess.run(
            ["sh", "-c", command],
            env=self.terminal.environment(**self.as_tenant),
            text=True,
            capture_output=True,
            check=True,
        )
        assert '"choices"' in answered.stdout, answered.stdout

    def call(self) -> None:
        assert self.ask("support-bot") == "acme/support-bot@1"

    def move_the_alias(self) -> None:
        push = ("adapters", "push", "json adapter", "support-bot")
        self.terminal.must(*push, **self.as_tenant)
        self.terminal.must(
            *("adapters", "alias", "set", "support-bot", "prod", "2"), **self.as_tenant
        )
        assert self.ask("support-bot@prod") == "acme/support-bot@2"

    def roll_back(self) -> None:
        self.terminal.must("adapters", "rollback", "support-bot", **self.as_tenant)
        assert self.ask("support-bot@prod") == "acme/support-bot@1"

    def delete(self) -> None:
        remove = ("adapters", "rm", "support-bot", "--version", "2", "--yes")
        assert "deleted support-bot@2" in self.terminal.must(*remove, **self.as_tenant)

    def sign_in(self) -> None:
        """Over the proxy: set a password by the link, sign out, sign in, see the overview."""
        with running_chromium() as browser:
            page = browser.new_context(ignore_https_errors=True).new_page()
            page.goto(f"{self.proxy_url}{self.invitation}")
            page.get_by_label("New password", exact=True).fill(PASSWORD)
            page.get_by_role("button", name="Set password and sign in").click()
            page.get_by_role("button", name="Sign out").click()
            page.get_by_label("Name", exact=True).fill("root")
            page.get_by_label("Password", exact=True).fill(PASSWORD)
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("button", name="Sign out")).to_be_visible()
            page.goto(f"{self.proxy_url}/console/tenants")
            expect(page.get_by_text("acme").first).to_be_visible()

    def be_refused_without_tls(self) -> None:
        """A password over plain HTTP under another name is refused, and the message says why."""
        answer = httpx.post(
            f"{self.server_url}/v1/session",
            json={"name": "root", "password": PASSWORD},
            headers={"host": "loraplex.example"},
        )
        assert answer.json()["error"]["code"] == "insecure_transport", answer.text

    def ask(self, model: str) -> str:
        """Which version answers through the proxy-less API and the unmodified client."""
        with OpenAI(base_url=f"{self.server_url}/v1", api_key=self.key) as client:
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            )
        return answer.model

    @property
    def as_tenant(self) -> dict[str, str]:
        return {"LORAPLEX_API_KEY": self.key, "LORAPLEX_URL": self.server_url}

    @property
    def steps(self) -> Mapping[str, Callable[[], None]]:
        return {
            "operator and login": self.make_operator,
            "tenant and key": self.make_tenant_and_key,
            "push, and the printed call": self.push,
            "call by the openai client": self.call,
            "a second version goes live": self.move_the_alias,
            "rollback": self.roll_back,
            "delete a version": self.delete,
            "console over TLS in Chromium": self.sign_in,
            "no password over plain HTTP": self.be_refused_without_tls,
        }


def main() -> int:
    started = time.monotonic()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="first hour ") as folder:
        terminal = Terminal(Path(folder))
        _unpack(terminal.folder)
        with _served(terminal) as hour:
            for name, step in hour.steps.items():
                _tell(name, _failure_of(step), failures)
            places = {
                "port": str(urlsplit(hour.server_url).port),
                "base": "my base",
                "key": hour.key,
            }
            with ThreadPoolExecutor(NUM_TERMINALS) as terminals:
                answers = terminals.map(
                    lambda made: check(made, terminal, places), MISTAKES.values()
                )
                for name, failure in zip(MISTAKES, answers, strict=True):
                    _tell(f"mistake: {name}", failure, failures)
    num_steps = len(hour.steps) + len(MISTAKES)
    print(
        f"{num_steps - len(failures)} passed, {len(failures)} failed; {len(MISTAKES)} mistakes; "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if failures else 0


def _unpack(folder: Path) -> None:
    """The demo's base and adapters, under names with a space."""
    (folder / "home").mkdir(mode=0o700)
    shutil.copytree(WEIGHTS / "base", folder / "my base")
    for name in ("sql", "json"):
        shutil.copytree(WEIGHTS / name, folder / f"{name} adapter")
    prepare(folder)


@contextmanager
def _served(terminal: Terminal) -> Iterator[FirstHour]:
    """The server with a relative data folder, and the TLS proxy before it."""
    options = ("--model", "my base", "--data-dir", "my data", "--port", "0", *SMALL)
    with terminal.serving(*options, LORAPLEX_TRUSTED_PROXIES="127.0.0.1") as url:
        terminal.variables["LORAPLEX_URL"] = url
        with _tls_proxy(terminal.folder, url) as proxy_url:
            yield FirstHour(terminal, url, proxy_url)


@contextmanager
def _tls_proxy(folder: Path, url: str) -> Iterator[str]:
    """Caddy with the compose file's own configuration, on loopback."""
    port = free_port()
    variables = {
        "PROXY_HTTP_PORT": str(free_port()),
        "PROXY_HTTPS_PORT": str(port),
        "PROXY_UPSTREAM": urlsplit(url).netloc,
        "XDG_DATA_HOME": str(folder / "caddy"),
        "XDG_CONFIG_HOME": str(folder / "caddy"),
    }
    with (folder / "caddy.log").open("wb") as log:
        proxy = subprocess.Popen(
            ["caddy", "run", "--config", str(CADDYFILE)],
            env=Terminal(folder).environment(**variables),
            stdout=log,
            stderr=log,
        )
    try:
        proxy_url = f"https://localhost:{port}"
        _wait_until_answered(proxy_url)
        yield proxy_url
    finally:
        proxy.terminate()
        proxy.wait(30)


def _wait_until_answered(url: str) -> None:
    deadline = time.monotonic() + PROXY_SECONDS
    while True:
        try:
            httpx.get(f"{url}/health", verify=False).raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _failure_of(step: Callable[[], None]) -> str | None:
    try:
        step()
    except Exception:
        return traceback.format_exc()
    return None


def _tell(name: str, failure: str | None, failures: list[str]) -> None:
    print(f"{'failed' if failure else 'ok':6}  {name}" + (f"\n{failure}" if failure else ""))
    sys.stdout.flush()
    if failure:
        failures.append(name)


if __name__ == "__main__":
    sys.exit(main())
