"""The Kubernetes manifests: built with kustomize, and checked with the schemas of the API."""

from __future__ import annotations

import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from support.tools import need_program

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = {
    "cpu": KUBERNETES,
    "cuda": KUBERNETES / "cuda",
    "fleet": KUBERNETES / "fleet",
    "ray": KUBERNETES / "ray",
}
API_VERSIONS = ("1.30", "1.33", "1.37")
CUSTOM_KINDS = {"RayCluster", "ServiceMonitor", "PrometheusRule"}
"""Kinds that operators define: the API has no schema of them."""

Manifest = dict[str, Any]


def build_text(overlay: str) -> str:
    kubectl = need_program("kubectl", package="kubernetes-client")
    command = [kubectl, "kustomize", str(OVERLAYS[overlay])]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return built.stdout


def build(overlay: str) -> list[Manifest]:
    return list(yaml.safe_load_all(build_text(overlay)))


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (
        each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return deepcopy(found)


def pods_of(ray_cluster: Manifest) -> list[Manifest]:
    """The templates of its pods, as objects of a kind that the API knows."""
    spec = ray_cluster["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": group["template"]}
        for group in groups
    ]


def check_schemas(manifests: list[Manifest], api_version: str) -> None:
    """Raises ValidationError if one does not fit its kind's schema, or has an unknown field."""
    for manifest in manifests:
        if manifest["kind"] == "RayCluster":
            check_schemas(pods_of(manifest), api_version)
        elif manifest["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(manifest, api_version, strict=True)
