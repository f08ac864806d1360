"""The Helm chart renders, fits the schemas of Kubernetes, and installs what kustomize installs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from helm_python import Chart, HelmError, lint

from loraplex.platform.version import __version__
from support.manifests import API_VERSIONS, Manifest, build, check_schemas, named

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "loraplex"
RELEASE = "test"
PREFIX = "test-loraplex"
"""How every object's name begins."""

MONITORED = {each: {"enabled": True} for each in ("serviceMonitor", "prometheusRule", "dashboard")}
SHARED_MODELS = {"accessMode": "ReadWriteMany"}
VARIANTS: dict[str, dict[str, Any]] = {
    "cpu": {"image": {"tag": "cpu"}},
    "cuda": {"image": {"tag": "cuda"}, "server": {"gpus": 1}},
    "fleet": {"image": {"tag": "cpu"}, "fleet": {"kind": "agents"}, "models": SHARED_MODELS},
    "ray": {
        "image": {"tag": "cpu"},
        "fleet": {"kind": "ray"},
        "models": SHARED_MODELS,
        "agent": {"gpus": 1},
        "ray": {"imageTag": "ray"},
    },
}
"""By overlay of deploy/kubernetes: the values that install the same."""

EVERYTHING = {
    **VARIANTS["fleet"],
    **MONITORED,
    "ingress": {"enabled": True, "hosts": ["llm.example.com"], "tlsSecret": "certificate"},
    "serviceAccount": {"create": True, "annotations": {"role": "loraplex"}},
    "env": [{"name": "LORAPLEX_LOG_LEVEL", "value": "debug"}],
}


@cache
def chart() -> Chart:
    return Chart.load(CHART)


def render_text(values: dict[str, Any], *, name: str = RELEASE) -> dict[str, str]:
    """By template."""
    return chart().render(values, name=name, namespace="loraplex")


def render(values: dict[str, Any], *, name: str = RELEASE) -> list[Manifest]:
    texts = [text for path, text in render_text(values, name=name).items() if "NOTES" not in path]
    documents = (yaml.load_all(text, yaml.CSafeLoader) for text in texts)
    return [each for several in documents for each in several if each is not None]


def merged(values: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = deepcopy(values)
    for name, value in other.items():
        inner = both.get(name)
        both[name] = merged(inner, value) if isinstance(inner, dict) else value
    return both


def comparable(value: Any) -> Any:
    """With the labels of deploy/kubernetes: `app` and `part`, and none of Helm's own."""
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if not isinstance(value, dict):
        return value
    names = {"app.kubernetes.io/name": "app", "app.kubernetes.io/component": "part"}
    renamed = {names.get(name, name): comparable(inner) for name, inner in value.items()}
    if renamed.get("key") in names:
        renamed["key"] = names[renamed["key"]]
    renamed.pop("app.kubernetes.io/instance", None)
    renamed.pop("annotations", None)
    return renamed


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Any]:
    """Without the labels of the objects themselves, which select nothing here."""
    named_manifests = {}
    for manifest in comparable(manifests):
        manifest["metadata"].pop("labels", None)
        named_manifests[manifest["kind"], manifest["metadata"]["name"]] = manifest
    return named_manifests


@pytest.mark.parametrize("overlay", VARIANTS)
def test_the_chart_installs_what_kustomize_installs(overlay: str) -> None:
    text = yaml.safe_dump_all(render(VARIANTS[overlay]))
    text = text.replace(f"{PREFIX}-", "").replace(PREFIX, "loraplex")
    charted, built = by_name(list(yaml.safe_load_all(text))), by_name(build(overlay))
    del built["Namespace", "loraplex"]
    # The job runs before the settings are made, and has its own.
    own_settings = charted.pop(("ConfigMap", "migrate"))
    assert own_settings["data"] == built["ConfigMap", "loraplex"]["data"]
    (migration,) = built["Job", "migrate"]["spec"]["template"]["spec"]["containers"]
    migration["envFrom"][0]["configMapRef"]["name"] = "migrate"
    assert charted == built


@pytest.mark.parametrize("values", [*VARIANTS.values(), EVERYTHING], ids=[*VARIANTS, "everything"])
def test_helm_finds_nothing_wrong(values: dict[str, Any]) -> None:
    report = lint(CHART, values, strict=True, with_subcharts=False)
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("api_version", API_VERSIONS)
def test_every_object_fits_the_schema_of_its_kind(api_version: str) -> None:
    """With everything on; what the variants install is what kustomize installs."""
    check_schemas(render(EVERYTHING), api_version)


@pytest.mark.slow  # importing the operator's models takes four seconds
def test_the_objects_of_the_prometheus_operator_fit_its_schemas() -> None:
    from cloudcoil.models.prometheus_operator import v1

    manifests = render(EVERYTHING)
    for kind in (v1.ServiceMonitor, v1.PrometheusRule):
        manifest = named(manifests, kind.__name__, PREFIX)
        read = kind.model_validate(manifest)
        assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == manifest


SAMPLES: dict[str, Any] = {
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "models.volume": {"hostPath": {"path": "/srv/models"}},
    "models.accessMode": "ReadOnlyMany",
    "env": [{"name": "LORAPLEX_LOG_LEVEL", "value": "info"}],
    "podDisruptionBudget.maxUnavailable": "50%",
    "service.type": "LoadBalancer",
    "ingress.hosts": ["other.example.com"],
    "networkPolicy.egress": [{"ports": [{"port": 9000, "protocol": "TCP"}]}],
    "serviceMonitor.interval": "30s",
    "prometheusRule.docsUrl": "https://wiki.example.com/loraplex",
}
POD_SAMPLES = {
    "args": ["--max-num-seqs=8"],
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "seccompProfile": {"type": "Localhost", "localhostProfile": "loraplex.json"},
    "resources": {"limits": {"memory": "1Gi"}},
}


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The values that are no group of others."""
    for name, value in values.items():
        here = (*path, name)
        is_group = isinstance(value, dict) and value and name not in {"resources", "seccompProfile"}
        if is_group and name not in {"settings", "labels"}:
            yield from leaves(value, here)
        else:
            yield ".".join(here), value


def sample(path: str, value: Any) -> Any:
    """Another valid value."""
    pod_sample = POD_SAMPLES.get(path.rsplit(".", 1)[-1])
    if (chosen := SAMPLES.get(path, pod_sample)) is not None:
        return chosen
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, dict):
        return {"example.com/name": "value"} if path != "settings" else {"LORAPLEX_STORE": "/other"}
    return "7Gi" if path.endswith("size") else "other"


DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


class Base(NamedTuple):
    """Values, and what they install."""

    values: dict[str, Any]
    rendered: dict[str, str]


@cache
def base(*, is_ray: bool) -> Base:
    values = merged(EVERYTHING, VARIANTS["ray"]) if is_ray else EVERYTHING
    return Base(merged(DEFAULTS, values), render_text(values))


@pytest.mark.parametrize("path", [path for path, _ in leaves(DEFAULTS)])
def test_every_value_changes_what_is_installed(path: str) -> None:
    values, rendered = base(is_ray=path.startswith("ray."))
    current: Any = values
    for name in path.split("."):
        current = current[name]
    changed: Any = "ray" if path == "fleet.kind" else sample(path, current)
    assert changed != current
    for name in reversed(path.split(".")):
        changed = {name: changed}
    assert render_text(merged(values, changed)) != rendered


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"server": {"replica": 2}}, "replica"),
        ({"settings": {"LORAPLEX_DATABASE": "postgresql://…"}}, "LORAPLEX_DATABASE"),
        ({"settings": {"LORAPLEX_DRAIN_SECONDS": 25}}, "LORAPLEX_DRAIN_SECONDS"),
        ({"ingress": {"enabled": True}}, "hosts"),
        ({"server": {"seccompProfile": {"type": "Localhost"}}}, "localhostProfile"),
        ({"server": {"replicas": 2}}, "accessMode"),
        ({"fleet": {"kind": "agents"}}, "accessMode"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(HelmError, match=reason):
        render(values)


def test_several_servers_can_read_the_base_from_a_folder_of_each_node() -> None:
    volume = {"hostPath": {"path": "/srv/models"}}
    manifests = render({"server": {"replicas": 2}, "models": {"volume": volume}})
    assert not [each for each in manifests if each["kind"] == "PersistentVolumeClaim"]
    pod = named(manifests, "StatefulSet", f"{PREFIX}-server")["spec"]["template"]["spec"]
    assert {"name": "models", **volume} in pod["volumes"]


def test_the_migration_runs_first_and_needs_nothing_that_comes_later() -> None:
    hooks = {
        (each["kind"], each["metadata"]["name"]): each["metadata"]["annotations"]
        for each in render(EVERYTHING)
        if "helm.sh/hook" in each["metadata"].get("annotations", {})
    }
    settings, job = hooks["ConfigMap", f"{PREFIX}-migrate"], hooks["Job", f"{PREFIX}-migrate"]
    assert settings["helm.sh/hook"] == job["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert int(settings["helm.sh/hook-weight"]) < int(job.get("helm.sh/hook-weight", "0"))
    pod = named(render(EVERYTHING), "Job", f"{PREFIX}-migrate")["spec"]["template"]["spec"]
    assert "serviceAccountName" not in pod
    (container,) = pod["containers"]
    assert container["envFrom"][0] == {"configMapRef": {"name": f"{PREFIX}-migrate"}}


def test_changed_settings_restart_servers_and_agents() -> None:
    def templates(values: dict[str, Any]) -> list[Any]:
        stateful = [each for each in render(values) if each["kind"] == "StatefulSet"]
        return [each["spec"]["template"]["metadata"] for each in stateful]

    before = templates(VARIANTS["fleet"])
    settings = {"settings": {"LORAPLEX_STORE": "s3://other/adapters"}}
    after = templates(merged(VARIANTS["fleet"], settings))
    assert len(before) == 2
    assert all(new != old for new, old in zip(after, before, strict=True))


def test_alerts_and_dashboard_are_those_of_the_repository() -> None:
    manifests = render(MONITORED)
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    assert named(manifests, "PrometheusRule", PREFIX)["spec"] == alerts
    dashboard = (DEPLOY / "grafana" / "dashboards" / "loraplex.json").read_text()
    found = named(manifests, "ConfigMap", f"{PREFIX}-dashboard")
    assert json.loads(found["data"]["loraplex.json"]) == json.loads(dashboard)
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_alerts_link_the_published_documentation() -> None:
    rule = {"prometheusRule": {"enabled": True, "docsUrl": "https://wiki.example.com/loraplex/"}}
    manifest = named(render(rule), "PrometheusRule", PREFIX)
    (group,) = manifest["spec"]["groups"]
    for alert in group["rules"]:
        anchor = f"operations.md#{alert['alert'].lower()}"
        url = f"https://wiki.example.com/loraplex/{anchor}"
        assert alert["annotations"]["runbook_url"] == url


def test_prometheus_reads_each_server_once_as_the_job_of_the_alerts() -> None:
    manifests = render(MONITORED)
    monitor = named(manifests, "ServiceMonitor", PREFIX)
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [each for each in manifests if each["kind"] == "Service"]
    (found,) = (each for each in services if wanted <= each["metadata"]["labels"].items())
    assert found["metadata"]["name"] == f"{PREFIX}-servers"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in found["spec"]["ports"]}
    labels = {each["targetLabel"]: each for each in endpoint["relabelings"]}
    alerts = (DEPLOY / "prometheus" / "alerts.yaml").read_text()
    assert f'job="{labels["job"]["replacement"]}"' in alerts
    assert endpoint["authorization"]["credentials"]["key"] == "LORAPLEX_METRICS_TOKEN"


def test_selectors_find_the_pods_of_one_release_only() -> None:
    for manifest in render(EVERYTHING):
        selector = manifest.get("spec", {}).get("selector", {})
        if manifest["kind"] in {"StatefulSet", "PodDisruptionBudget", "Service"}:
            labels = selector.get("matchLabels", selector)
            assert labels["app.kubernetes.io/instance"] == RELEASE
            assert labels["app.kubernetes.io/component"] in {"server", "agent"}


def test_names_of_pods_fit_into_a_label() -> None:
    name = "a-release-with-a-name-as-long-as-helm-permits-them"
    manifests = render(EVERYTHING, name=name)
    for manifest in manifests:
        assert len(manifest["metadata"]["name"]) <= 63
        if manifest["kind"] == "StatefulSet":
            # Its pods have a label of its name and a hash of ten characters.
            assert len(manifest["metadata"]["name"]) + len("-0123456789") <= 63


def test_notes_warn_of_an_ingress_that_the_server_does_not_trust() -> None:
    ingress = {"ingress": {"enabled": True, "hosts": ["llm.example.com"]}}

    def notes(values: dict[str, Any]) -> str:
        (text,) = (text for path, text in render_text(values).items() if "NOTES" in path)
        return text

    trusted = {"settings": {"LORAPLEX_TRUSTED_PROXIES": "10.0.0.0/8"}}
    assert "WARNING" in notes(ingress)
    assert "WARNING" not in notes(merged(ingress, trusted))


def test_a_packaged_chart_installs_the_same(tmp_path: Path) -> None:
    with Chart.load(chart().save(tmp_path)) as packaged:
        rendered = packaged.render(EVERYTHING, name=RELEASE, namespace="loraplex")
    assert rendered == render_text(EVERYTHING)


def test_the_chart_has_the_version_of_the_package() -> None:
    assert chart().metadata["appVersion"] == chart().version == __version__
    server = named(render({}), "StatefulSet", f"{PREFIX}-server")["spec"]["template"]["spec"]
    assert server["containers"][0]["image"] == f"loraplex:{__version__}-cpu"
