"""The manifests build with kustomize and are valid for the Kubernetes API."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from support.manifests import (
    API_VERSIONS,
    KUBERNETES,
    OVERLAYS,
    build,
    build_text,
    check_schemas,
    named,
    pods_of,
)

KINDS = {
    *("Namespace", "ConfigMap", "Job", "StatefulSet", "PersistentVolumeClaim"),
    *("PodDisruptionBudget", "Service", "NetworkPolicy"),
}


@pytest.fixture(scope="module", params=OVERLAYS)
def built(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return build(request.param)


@pytest.mark.parametrize("api_version", API_VERSIONS)
def test_every_object_fits_the_schema_of_its_kind(
    built: list[dict[str, Any]], api_version: str
) -> None:
    assert {manifest["kind"] for manifest in built} - {"RayCluster"} == KINDS
    check_schemas(built, api_version)


def test_a_misspelt_field_is_noticed(built: list[dict[str, Any]]) -> None:
    server = named(built, "StatefulSet", "server")
    server["spec"]["template"]["spec"]["terminationGracePeriod"] = 45
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schemas([server], API_VERSIONS[-1])


def test_the_cuda_overlay_differs_by_its_image_and_one_gpu() -> None:
    cpu, cuda = build_text("cpu"), build_text("cuda")
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
    fleet = build("fleet")
    agent = named(fleet, "StatefulSet", "agent")["spec"]["template"]
    (cluster,) = (each for each in build("ray") if each["kind"] == "RayCluster")
    (worker,) = (group["template"] for group in cluster["spec"]["workerGroupSpecs"])
    for template in (agent, worker):
        (container,) = template["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "loraplex-agents"}}]
        names = {variable["name"] for variable in container["env"]}
        assert names & {"LORAPLEX_DATABASE", "LORAPLEX_SECRET"} == set()


def test_api_servers_know_every_agent_by_its_stable_name() -> None:
    fleet = build("fleet")
    agent = named(fleet, "StatefulSet", "agent")["spec"]
    settings = named(fleet, "ConfigMap", "loraplex")["data"]
    assert settings["LORAPLEX_REPLICA_ADDRESSES"].split(",") == [
        f"agent-{number}.{agent['serviceName']}:7070" for number in range(agent["replicas"])
    ]


def test_the_ray_cluster_requires_tokens_and_outlives_its_head() -> None:
    built = build("ray")
    cluster = named(built, "RayCluster", "loraplex")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"]["gcsFaultToleranceOptions"]["redisAddress"]
    for pod in pods_of(cluster):
        (container,) = pod["template"]["spec"]["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["RAY_gcs_rpc_server_reconnect_timeout_s"] == "86400"
