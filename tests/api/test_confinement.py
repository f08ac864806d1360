"""The reported confinement of examinations, and when a server refuses to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.confinement_probe import ConfinementReport, measure_confinement
from loraplex.api.cli import main
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.server import confinement
from support.server import ServerUnderTest, child_environment


@pytest.fixture(scope="module")
def here() -> ConfinementReport:
    return measure_confinement()


def test_operators_see_at_the_server_what_was_measured(
    server: ServerUnderTest, here: ConfinementReport
) -> None:
    key = server.make_operator("confinement-viewer")
    url = f"{server.url}/admin/readiness"
    found = httpx.get(url, headers={"Authorization": f"Bearer {key}"}).json()
    assert (found["is_ready"], found["reason"]) == (True, None)
    shown = found["confinement"]
    assert shown["is_complete"] is (not here.missing)
    measured = {state.name: state.is_in_force for state in here.mechanisms}
    assert {entry["name"]: entry["is_in_force"] for entry in shown["mechanisms"]} == measured
    assert [entry["act"] for entry in shown["possible"]] == [act.act for act in here.possible]
    (logged,) = events(server.log.read_text())
    assert {name: logged[name] for name in measured} == measured
    assert logged["level"] == ("warning" if here.missing else "info")


def events(log: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in log.splitlines() if line.startswith("{"))
    return [line for line in lines if line.get("event") == "confinement"]


FORBIDDEN = """
import asyncio, json, sys
from support.container_profile import forbid_confinement
forbid_confinement()
from loraplex.api.cli import doctor, main
from loraplex.api.server.confinement import check_confinement
from loraplex.api.telemetry.logs import configure_logging
from loraplex.api.routes.readiness import _view
configure_logging()
view = _view(asyncio.run(check_confinement(is_required=False)))
print(json.dumps({
    "states": {finding.check: finding.state for finding in doctor._confinement()},
    "is_complete": view.is_complete,
    "in_force": {entry.name: entry.is_in_force for entry in view.mechanisms},
    "possible": [entry.act for entry in view.possible],
    "code": main(),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such profiles")
def test_where_a_container_forbids_it_every_place_says_so_and_a_server_that_needs_it_refuses(
    tiny_base: Path, tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    serve = ["serve", "--model", str(tiny_base), "--data-dir", str(data_dir), "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, *serve, "--require-confinement"],
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["states"] == {
        "confinement: namespaces": "warning",
        "confinement: landlock": "warning",
        "confinement: limits": "ok",
        "confinement: seccomp": "ok",
        "confinement: open": "warning",
    }
    in_force = {"namespaces": False, "landlock": False, "limits": True, "seccomp": True}
    assert (found["is_complete"], found["in_force"]) == (False, in_force)
    assert "read_file" in found["possible"]

    (logged,) = events(done.stderr)
    assert logged["level"] == "warning"
    assert {name: logged[name] for name in in_force} == in_force
    assert logged["missing"].keys() == {"namespaces", "landlock"}

    assert found["code"] == ExitCode.FAILED
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("Error: "))
    assert "namespaces (" in line
    assert "landlock (a seccomp profile forbids Landlock: allow the `landlock_*`" in line
    assert "limits (" not in line
    assert line.endswith("(confinement_missing)")
    assert not data_dir.exists(), "it refused before anything else"


def test_the_setting_asks_for_it_as_the_option_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "loraplex.adapters.child.PYTHON", (str(tmp_path / "no-python"),)
    )  # nothing can be measured
    monkeypatch.setattr("loraplex.api.telemetry.logs.configure_logging", lambda *options: None)
    confinement.confinement_here.cache_clear()
    monkeypatch.setenv("LORAPLEX_REQUIRE_CONFINEMENT", "true")
    arguments = ["--model", str(tmp_path), "--data-dir", str(tmp_path / "data"), "--port", "0"]
    monkeypatch.setattr(sys, "argv", ["loraplex", "serve", *arguments])
    try:
        assert main() == ExitCode.FAILED
    finally:
        confinement.confinement_here.cache_clear()
    assert capfd.readouterr().err.splitlines()[-1].endswith("(confinement_missing)")
