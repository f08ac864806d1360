"""The wheel in a clean environment: the command line alone, then with the engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from loraplex.platform.version import __version__
from support.clean_environment import Environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LORAPLEX_WHEEL_VENV" not in os.environ, reason="make wheel-check runs it"),
]
ROOT = Path(__file__).parents[2]
SMALL = ("--num-threads", "1", "--memory-gib", "0.5", "--host-cache-gib", "0.05")
KEY = re.compile(r"^lpx_\S+$", re.MULTILINE)


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel that `make wheel` has built."""
    (built,) = (ROOT / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean() -> Environment:
    """With the wheel and what its core brings."""
    return Environment(Path(os.environ["LORAPLEX_WHEEL_VENV"]).resolve())


@pytest.fixture(scope="module")
def with_engine(clean: Environment) -> Environment:
    """The same, with what the extra brings. Runs last of this file, because the others need it
    without."""
    clean.link_engine()
    return clean


def test_the_wheel_has_each_top_level_folder_as_a_subpackage(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    folders = {name.split("/")[1] for name in names if name.startswith("loraplex/")}
    links = {path.name for path in (ROOT / ".src" / "loraplex").iterdir()} - {"__pycache__"}
    assert folders == links
    assert {"loraplex/platform/version.py", "loraplex/migrations/env.py"} <= set(names)
    assert "loraplex/api/static/console/index.html" in names
    assert any(name.startswith("loraplex/api/demo/weights/base/") for name in names)
    assert not [name for name in names if "/tests/" in name or "node_modules" in name]
    assert wheel.name.startswith(f"loraplex-{__version__}-")


def test_the_command_line_is_whole_without_torch(clean: Environment) -> None:
    assert clean.loraplex("--version").stdout == f"loraplex {__version__}\n"
    assert not list(clean.packages.glob("torch*"))
    script = "from loraplex.api.cli.reference import cli_reference; print(cli_reference(), end='')"
    ended = subprocess.run(
        [str(clean.python), "-c", script],
        cwd=clean.folder,
        env=clean.variables(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == (ROOT / "docs" / "cli.md").read_text()


def test_serve_without_the_engine_prints_the_command_that_installs_it(clean: Environment) -> None:
    ended = clean.loraplex("serve", "base")
    assert ended.returncode == 1
    assert ended.stderr.endswith("Error: serving needs torch: pip install 'loraplex[engine]'\n")


def test_an_api_server_of_a_fleet_needs_no_engine(clean: Environment) -> None:
    base = clean.packages / "loraplex" / "api" / "demo" / "weights" / "base"
    ended = clean.loraplex(
        *("serve", str(base), "--port", "0", "--data-dir", str(clean.folder / "of-a-fleet")),
        *("--fleet-certificates", str(clean.folder / "none")),
    )
    assert ended.stderr.splitlines()[-1].startswith("Error: --fleet-certificates: ")


def test_a_database_is_made_from_the_migrations_in_the_wheel(clean: Environment) -> None:
    ended = clean.loraplex("db", "upgrade", "--data-dir", str(clean.folder / "other"))
    assert ended.returncode == 0, ended.stderr


def test_with_the_engine_an_adapter_is_pushed_and_answers(with_engine: Environment) -> None:
    """And no test package is there."""
    weights = with_engine.packages / "loraplex" / "api" / "demo" / "weights"
    data = ("--data-dir", str(with_engine.folder / "data"))
    assert not {"pytest", "openai", "peft"} & {path.name for path in with_engine.packages.iterdir()}
    with with_engine.serving(str(weights / "base"), *SMALL, *data) as url:
        run = with_engine.loraplex
        operator = KEY.search(run("operators", "create", "root", *data).stdout)
        assert operator is not None
        assert run("login", "--url", url, stdin=operator[0]).returncode == 0
        assert run("tenants", "create", "acme").returncode == 0
        key = run("keys", "create", "--tenant", "acme").stdout.strip()
        (with_engine.folder / "key").write_text(key)
        pushed = run("adapters", "push", str(weights / "sql"), "sql", "--tenant", "acme")
        assert pushed.returncode == 0, pushed.stderr
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            json={"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
            timeout=60,
        )
    assert answer.status_code == 200, json.dumps(answer.json())
    assert answer.json()["model"] == "acme/sql@1"
