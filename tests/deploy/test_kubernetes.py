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
OVERLAYS = {"cpu": KUBERNETES, "cuda": KUBERNETES / "cuda"}


@pytest.fixture(scope="module", params=OVERLAYS)
def built(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    kubectl = need_program("kubectl", package="kubernetes-client")
    command = [kubectl, "kustomize", str(OVERLAYS[request.param])]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))


def test_every_object_fits_the_schema_of_its_kind(built: list[dict[str, Any]]) -> None:
    assert {document["kind"] for document in built} == KINDS
    for document in built:
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_a_misspelt_field_is_noticed(built: list[dict[str, Any]]) -> None:
    (server,) = (deepcopy(document) for document in built if document["kind"] == "StatefulSet")
    server["spec"]["template"]["spec"]["terminationGracePeriod"] = 45
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(server, "1.33", strict=True)


def test_the_cuda_overlay_differs_by_its_image_and_one_gpu() -> None:
    kubectl = need_program("kubectl", package="kubernetes-client")
    texts = [
        subprocess.run(
            [kubectl, "kustomize", str(path)], capture_output=True, text=True, check=True
        )
        for path in OVERLAYS.values()
    ]
    cpu, cuda = (text.stdout for text in texts)
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
