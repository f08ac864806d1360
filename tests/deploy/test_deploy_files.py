"""The files in deploy/ match the software: their settings, options, routes and metrics exist."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.main import get_command

from loraplex.api.cli import agent, serve
from loraplex.api.routes import operations
from loraplex.api.settings import Settings
from support.tools import need_program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
YAML_FILES = sorted(path for path in DEPLOY.rglob("*.yaml") if path.parent.name != "templates")
METRIC = re.compile(r"loraplex_[a-z0-9_]+")
HISTOGRAM_PARTS = ("_bucket", "_count", "_sum")
FOR_COMPOSE_ALONE = {
    *("LORAPLEX_MODEL", "LORAPLEX_IMAGE_TAG", "LORAPLEX_HOSTNAME", "LORAPLEX_TLS"),
}
"""Variables that compose itself reads, for options and for its proxy; no setting of the server."""


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def find_all(value: Any, key: str) -> Iterator[Any]:
    """Whatever stands under `key`, anywhere in a document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from find_all(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find_all(inner, key)


def documented_metrics() -> set[str]:
    return set(METRIC.findall((ROOT / "docs" / "metrics.md").read_text()))


def named_metrics(text: str) -> set[str]:
    names = set(METRIC.findall(text))
    for part in HISTOGRAM_PARTS:
        names = {name.removesuffix(part) for name in names}
    return names


def load_dashboard_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard", DEPLOY / "grafana" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_yaml_file_can_be_read(path: Path) -> None:
    assert all(document is not None for document in documents(path))


def test_every_setting_that_is_named_exists() -> None:
    known = {f"LORAPLEX_{name.upper()}" for name in Settings.model_fields}
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    texts = [path.read_text() for path in files]
    named = {name for text in texts for name in re.findall(r"\bLORAPLEX_[A-Z_]+\b", text)}
    assert named - FOR_COMPOSE_ALONE
    assert named - known - FOR_COMPOSE_ALONE == set()


def test_every_option_of_the_served_command_exists() -> None:
    command: Any = get_command(serve.app)
    known = {name for parameter in command.params for name in parameter.opts}
    compose = documents(DEPLOY / "compose" / "compose.yaml")[0]
    server = documents(DEPLOY / "kubernetes" / "base" / "server.yaml")[0]
    commands = [compose["services"]["server"]["command"], *find_all(server, "args")]
    for arguments in commands:
        assert arguments[0] == "serve"
        assert {word for word in arguments if word.startswith("--")} <= known


def test_every_option_of_the_agents_command_exists() -> None:
    command: Any = get_command(agent.app)
    known = {name for parameter in command.params for name in parameter.opts}
    compose = documents(DEPLOY / "compose" / "compose.agents.yaml")[0]
    agents = documents(DEPLOY / "kubernetes" / "fleet" / "agents.yaml")
    services = [service for name, service in compose["services"].items() if name != "server"]
    assert len(services) == 3
    for arguments in [*(each["command"] for each in services), *find_all(agents, "args")]:
        assert arguments[0] == "agent"
        options = {word.split("=")[0] for word in arguments if word.startswith("--")}
        assert options <= known


def test_agents_of_compose_have_no_database_and_no_secret() -> None:
    compose = documents(DEPLOY / "compose" / "compose.agents.yaml")[0]
    servers = compose["services"].pop("server")["environment"]["LORAPLEX_REPLICA_ADDRESSES"]
    assert servers.split(",") == [f"{name}:7070" for name in compose["services"]]
    for service in compose["services"].values():
        assert {"LORAPLEX_DATABASE", "LORAPLEX_SECRET"} & set(service["environment"]) == set()


def test_probes_ask_for_routes_that_are_open() -> None:
    routes = {getattr(route, "path", "") for route in operations.router.routes}
    probes = list(find_all(documents(DEPLOY / "kubernetes" / "base" / "server.yaml"), "httpGet"))
    assert {probe["path"] for probe in probes} == {"/health", "/ready"}
    assert {probe["path"] for probe in probes} <= routes


def test_every_grace_period_is_the_same_and_outlasts_the_drain() -> None:
    settings = documents(DEPLOY / "kubernetes" / "base" / "settings.yaml")[0]
    server = documents(DEPLOY / "kubernetes" / "base" / "server.yaml")
    (kubernetes_grace,) = find_all(server, "terminationGracePeriodSeconds")
    compose = documents(DEPLOY / "compose" / "compose.yaml")[0]
    compose_grace = int(compose["services"]["server"]["stop_grace_period"].removesuffix("s"))
    drains = (float(settings["data"]["LORAPLEX_DRAIN_SECONDS"]), Settings().drain_seconds)
    assert kubernetes_grace == compose_grace >= max(drains) + 10
    operations = (ROOT / "docs" / "operations.md").read_text()
    assert f"grace period of {compose_grace} s" in operations


def test_the_server_trusts_the_address_of_the_proxy_alone() -> None:
    compose = documents(DEPLOY / "compose" / "compose.yaml")[0]
    (pool,) = compose["networks"]["default"]["ipam"]["config"]
    proxy = compose["services"]["proxy"]["networks"]["default"]["ipv4_address"]
    assert compose["services"]["server"]["environment"]["LORAPLEX_TRUSTED_PROXIES"] == proxy
    assert ip_address(proxy) in ip_network(pool["subnet"])
    assert ip_address(proxy) not in ip_network(pool["ip_range"]), "another container may take it"


def test_the_proxy_serves_https_and_asks_the_server() -> None:
    caddy = need_program("caddy", package="caddy")
    file = DEPLOY / "compose" / "Caddyfile"
    command = [caddy, "adapt", "--config", str(file)]
    adapted = subprocess.run(command, capture_output=True, text=True, check=True)
    config = json.loads(adapted.stdout)["apps"]["http"]
    (server,) = config["servers"].values()
    assert server["listen"] == [":443"]
    assert list(find_all(config, "dial")) == ["server:8000"]
    assert list(find_all(config, "host")) == [["localhost"]]


def test_every_metric_of_dashboard_and_alerts_is_documented() -> None:
    texts = [
        (DEPLOY / "grafana" / "dashboards" / "loraplex.json").read_text(),
        (DEPLOY / "prometheus" / "alerts.yaml").read_text(),
    ]
    for text in texts:
        assert len(named_metrics(text)) >= 8
        assert named_metrics(text) - documented_metrics() == set()


def test_the_dashboard_is_what_its_script_writes() -> None:
    script = load_dashboard_script()
    assert script.PATH.read_text() == script.text()
    assert json.loads(script.text())["panels"]


def test_every_panel_is_described_and_asks_the_chosen_prometheus() -> None:
    dashboard = json.loads(load_dashboard_script().text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert {panel["type"] for panel in panels} == {"stat", "timeseries"}
    assert [panel["title"] for panel in panels if not panel["description"]] == []
    assert {source["uid"] for source in find_all(dashboard, "datasource")} == {"${datasource}"}
    (variable,) = (each for each in dashboard["templating"]["list"] if each["name"] == "datasource")
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(load_dashboard_script().text())["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken
        taken |= cells


def test_every_query_of_the_dashboard_is_one_that_prometheus_reads(tmp_path: Path) -> None:
    promtool = need_program("promtool", package="prometheus")
    queries = list(find_all(json.loads(load_dashboard_script().text()), "expr"))
    assert len(queries) > 30
    rules = [{"record": f"panel{number}", "expr": each} for number, each in enumerate(queries)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = [promtool, "check", "rules", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def alerts() -> list[dict[str, Any]]:
    (group,) = documents(DEPLOY / "prometheus" / "alerts.yaml")[0]["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_every_alert_links_its_runbook() -> None:
    runbooks = (ROOT / "docs" / "operations.md").read_text()
    assert alerts()
    for alert in alerts():
        assert f"### {alert['alert']}\n" in runbooks
        section = f"docs/operations.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == section


def test_alerts_fire_when_they_should() -> None:
    promtool = need_program("promtool", package="prometheus")
    subprocess.run(
        [promtool, "test", "rules", "alerts.test.yaml"], cwd=DEPLOY / "prometheus", check=True
    )


def test_every_alert_is_seen_firing() -> None:
    tests = documents(DEPLOY / "prometheus" / "alerts.test.yaml")[0]["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    assert {alert["alert"] for alert in alerts()} == fired
