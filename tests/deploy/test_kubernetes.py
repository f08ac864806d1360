"""The manifests build with kustomize and are valid for the Kubernetes API."""

from __future__ import annotations

import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from support.tools import need_program

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
KINDS = {
    *("Namespace", "ConfigMap", "Job", "StatefulSet", "PersistentVolumeClaim"),
    *("PodDisruptionBudget", "Service", "NetworkPolicy"),
}
OVERLAYS = {
    "cpu": KUBERNETES,
    "cuda": KUBERNETES / "cuda",
    "fleet": KUBERNETES / "fleet",
    "ray": KUBERNETES / "ray",
}


@pytest.fixture(scope="module", params=OVERLAYS)
def built(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(build(request.param)))


def build(overlay: str) -> str:
    kubectl = need_program("kubectl", package="kubernetes-client")
    command = [kubectl, "kustomize", str(OVERLAYS[overlay])]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return built.stdout


def named(built: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in built if each["kind"] == kind and each["metadata"]["name"] == name)
    return deepcopy(found)


def pods_of(ray_cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods' templates: Kubernetes has no schema of what surrounds them."""
    spec = ray_cluster["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": group["template"]}
        for group in groups
    ]


def test_every_object_fits_the_schema_of_its_kind(built: list[dict[str, Any]]) -> None:
    assert {document["kind"] for document in built} - {"RayCluster"} == KINDS
    for document in built:
        for each in pods_of(document) if document["kind"] == "RayCluster" else [document]:
            kubernetes_validate.validate(each, "1.33", strict=True)


def test_a_misspelt_field_is_noticed(built: list[dict[str, Any]]) -> None:
    server = named(built, "StatefulSet", "server")
    server["spec"]["template"]["spec"]["terminationGracePeriod"] = 45
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(server, "1.33", strict=True)


def test_the_cuda_overlay_differs_by_its_image_and_one_gpu() -> None:
    cpu, cuda = build("cpu"), build("cuda")
    assert set(cuda.splitlines()) - set(cpu.splitlines()) == {
        "        image: loraplex:cuda",
        "            nvidia.com/gpu: 1",
    }


def test_a_read_only_root_leaves_every_cache_a_writable_folder() -> None:
    dockerfile = (KUBERNETES.parent / "Dockerfile").read_text()
    caches = ("XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR")
    for name in caches:
        assert f"{name}=/var/lib/loraplex/" in dockerfile
    for name in ("server", "migrate"):
        text = (KUBERNETES / "base" / f"{name}.yaml").read_text()
        pod = next(iter(yaml.safe_load_all(text)))["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/var/lib/loraplex", "/tmp"} <= mounted


def test_agents_are_given_no_database_and_no_secret_of_the_server() -> None:
    fleet = list(yaml.safe_load_all(build("fleet")))
    agent = named(fleet, "StatefulSet", "agent")["spec"]["template"]
    (cluster,) = (each for each in yaml.safe_load_all(build("ray")) if each["kind"] == "RayCluster")
    (worker,) = (group["template"] for group in cluster["spec"]["workerGroupSpecs"])
    for template in (agent, worker):
        (container,) = template["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "loraplex-agents"}}]
        names = {variable["name"] for variable in container["env"]}
        assert names & {"LORAPLEX_DATABASE", "LORAPLEX_SECRET"} == set()


def test_api_servers_know_every_agent_by_its_stable_name() -> None:
    fleet = list(yaml.safe_load_all(build("fleet")))
    agent = named(fleet, "StatefulSet", "agent")["spec"]
    settings = named(fleet, "ConfigMap", "loraplex")["data"]
    assert settings["LORAPLEX_REPLICA_ADDRESSES"].split(",") == [
        f"agent-{number}.{agent['serviceName']}:7070" for number in range(agent["replicas"])
    ]


def test_the_ray_cluster_requires_tokens_and_outlives_its_head() -> None:
    built = list(yaml.safe_load_all(build("ray")))
    cluster = named(built, "RayCluster", "loraplex")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"]["gcsFaultToleranceOptions"]["redisAddress"]
    for pod in pods_of(cluster):
        (container,) = pod["template"]["spec"]["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["RAY_gcs_rpc_server_reconnect_timeout_s"] == "86400"
