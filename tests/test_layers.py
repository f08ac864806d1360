"""The layers and the layout of the repository, as in docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support.packages import LAYERS as DIVIDED
from support.packages import from_bottom_to_top, package_imports, with_pictures

ROOT = Path(__file__).parents[1]
LAYERS = ("platform", "adapters", "engine", "kernels", "api", "migrations")
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "adapters": set(),
    "engine": {"adapters", "kernels"},
    "platform": {"adapters"},
    "migrations": {"platform"},
    "api": {"platform", "engine", "adapters", "kernels"},
}
TORCH = {"torch", "triton", "peft"}
CORE_TORCH_FREE = (
    "platform.database",
    "adapters.identity",
    "adapters.layout",
    "adapters.layout_part",
    "adapters.block",
    "adapters.examination",
    "adapters.export",
    "adapters.formats",
    "adapters.manager",
    "adapters.extents",
    "adapters.fetcher_client",
    "adapters.fetcher_process",
    "adapters.store.opening",
    "engine.scheduling.scheduler",
    "engine.scheduling.adapter_leases",
    "engine.scheduling.adapter_provider",
    "engine.scheduling.candidates",
    "engine.scheduling.held_requests",
    "engine.scheduling.prefills",
    "engine.scheduling.queue_limits",
    "engine.scheduling.swap_costs",
    "engine.scheduling.tenant_order",
    "engine.scheduling.adapter_queues",
    "engine.scheduling.backlog",
    "engine.scheduling.deadlines",
    "engine.execution.execution",
    "engine.scheduling.groups",
    "engine.scheduling.preemption",
    "engine.scheduling.admission_planner",
    "engine.scheduling.running",
    "engine.scheduling.shares",
    "engine.scheduling.batch",
    "engine.scheduling.fairness",
    "engine.scheduling.waiting",
    "engine.scheduling.step_costs",
    "engine.speculation.control",
    "engine.scheduling.draft_policy",
    "engine.kv.block_pool",
    "engine.kv.blocks",
    "engine.kv.group_blocks",
    "engine.kv.sequence_blocks",
    "engine.kv.shared_prefixes",
    "engine.kv.layout",
    "engine.kv.host_slots",
    "engine.kv.disk_slots",
    "engine.kv.disk_store",
    "engine.kv.disk_tier",
    "engine.kv.tier_key",
    "engine.scheduling.disk_reads",
    "engine.kv.prefix_cache",
    "engine.memory.kv_budget",
    "engine.kv.groups",
    "engine.grammars.compiler",
    "engine.checkpoint.files",
    "engine.messages",
    "engine.ranks.followers",
    "engine.shards.shard_plan",
    "engine.fleet.router",
    "engine.fleet.warm_targets",
    "engine.gguf.config",
    "engine.scheduling.tenant_labels",
    "engine.memory.utilization",
    "engine.process.client",
    "engine.heartbeat",
    "engine.process.quarantine",
    "engine.fleet.certificates",
    "engine.fleet.link",
    "engine.process.reference_base",
    "engine.tuning.environment",
    "engine.tuning.examples",
    "engine.tuning.process",
    "engine.tuning.step_plan",
    "engine.tuning.methods",
    "engine.tuning.trainer_needs",
    "engine.tuning.trainer_probe",
    "engine.speculation.draft_cache",
    "api.cli",
    "api.cli.adapters",
    "api.app",
    "api.client.client",
)
HTTP_FREE = {
    *("contract", "control_plane", "adapters", "tools", "schemas", "telemetry", "inference"),
    *("upkeep", "client", "offline"),
}
"""Packages of `api/`."""
BANNED_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "xxhash"}
BANNED_CALLS = {"eval", "exec"}
ENGINE_IMAGE = {"torch", "triton", "transformers", "safetensors", "numpy"}
EDGES = {
    "engine/process/transport.py": {"msgspec"},
    "engine/process/main.py": {"msgspec"},
    "engine/process/engine_process.py": {"msgspec"},
    "engine/ranks/commands.py": {"msgspec"},
    "engine/tuning/messages.py": {"msgspec"},
    "engine/ranks/main.py": {"msgspec"},
    "engine/ranks/rank_group.py": {"msgspec"},
    "engine/ranks/rank_pipe.py": {"msgspec"},
    "engine/text/tokenizer.py": {"tokenizers", "jinja2"},
    "engine/text/detokenizer.py": {"tokenizers"},
    "engine/text/token_coverage.py": {"tokenizers"},
    "engine/checkpoint/files.py": {"huggingface_hub"},
    "engine/gguf/file.py": {"gguf"},
    "engine/grammars/compiler.py": {"llguidance"},
    "engine/kv/prefix_file.py": {"cryptography"},
    "engine/kv/prefix_keys.py": {"cryptography"},
    "engine/grammars/vocabulary.py": {"tokenizers"},
    "engine/speculation/adapted_base.py": {"peft"},
    "engine/tuning/adapter.py": {"peft"},
    "engine/tuning/checkpoints.py": {"msgspec"},
    "engine/tuning/lines.py": {"msgspec"},
    "engine/tuning/run.py": {"msgspec"},
    "engine/tuning/trainer_probe.py": {"accelerate", "peft"},
    "adapters/fetcher_messages.py": {"msgspec"},
    "adapters/json_frames.py": {"msgspec"},
    "adapters/store/s3_client.py": {"boto3", "botocore", "urllib3"},
}
"""Imports beyond what a bare GPU image has, where they are allowed."""


@cache
def sources() -> tuple[tuple[Path, tuple[ast.AST, ...]], ...]:
    """Each file and its nodes: to walk a tree takes as long as to parse it."""
    paths = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    return tuple((path, tuple(ast.walk(ast.parse(path.read_text())))) for path in paths)


def imported(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Absolute dotted names of what a file imports; our own begin with `loraplex.`"""
    package = ["loraplex", *path.relative_to(ROOT).parts[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def test_every_module_of_ours_that_is_imported_is_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, nodes in sources()
        for name in imported(path, nodes)
        if name.startswith("loraplex.")
        and not (place := ROOT.joinpath(*name.split(".")[1:])).is_dir()
        and not place.with_suffix(".py").is_file()
        and name != "loraplex.platform.version"
    ]
    assert missing == []


def test_no_layer_imports_one_above_it() -> None:
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, nodes in sources()
        for name in imported(path, nodes)
        if name.startswith("loraplex.")
        and (target := name.split(".")[1]) in LAYERS
        and target != (layer := path.relative_to(ROOT).parts[0])
        and target not in MAY_IMPORT[layer]
    ]
    # Every layer may know the version.
    assert [line for line in upward if not line.endswith("loraplex.platform.version")] == []


@pytest.mark.parametrize("layer", DIVIDED)
def test_no_package_imports_one_above_it(layer: str) -> None:
    # Raises CycleError, and names the cycle.
    assert set(from_bottom_to_top(package_imports(layer))) == set(package_imports(layer))


def test_services_know_no_http() -> None:
    found = [
        f"{where} imports {name}"
        for path, nodes in sources()
        if (where := path.relative_to(ROOT)).parts[:2] in {("api", name) for name in HTTP_FREE}
        for name in imported(path, nodes)
        if name.split(".")[0] in {"fastapi", "starlette", "uvicorn"}
    ]
    assert found == []


@pytest.mark.parametrize(("layer", "most"), [("engine", 25), ("api", 20)])
def test_a_layer_has_few_flat_files(layer: str, most: int) -> None:
    assert len(list((ROOT / layer).glob("*.py"))) <= most


def test_the_pictures_of_the_packages_are_current() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert with_pictures(page) == page, "run `make docs`"


def test_every_path_in_the_documents_exists() -> None:
    folders = "|".join((*LAYERS, "tests", "docs", "benchmarks"))
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    missing = []
    for document in documents:
        named = set(re.findall(rf"`((?:{folders})/[\w./-]*)`", document.read_text()))
        missing += [f"{document.name}: {path}" for path in named if not (ROOT / path).exists()]
        assert document.name != "architecture.md" or len(named) > 80
    assert sorted(missing) == []


@pytest.mark.slow
def test_what_the_core_needs_imports_without_torch() -> None:
    script = (
        "import importlib, sys\n"
        f"for module in {CORE_TORCH_FREE!r}:\n"
        "    importlib.import_module(f'loraplex.{module}')\n"
        f"    if found := {TORCH!r} & {{name.split('.')[0] for name in sys.modules}}:\n"
        "        sys.exit(f'{module} imports {found}')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / ".src")},
    )
    assert ended.returncode == 0, ended.stderr


def test_engine_adapters_and_kernels_need_no_more_than_a_bare_gpu_image_has() -> None:
    allowed = ENGINE_IMAGE | set(sys.stdlib_module_names) | {"loraplex"}
    beyond = [
        f"{where} imports {name}"
        for path, nodes in sources()
        if (where := str(path.relative_to(ROOT))).startswith(("engine/", "adapters/", "kernels/"))
        for name in imported(path, nodes)
        if name.split(".")[0] not in allowed | EDGES.get(where, set())
    ]
    assert beyond == []


def test_nothing_deserializes_or_executes_what_others_wrote() -> None:
    found = []
    for path, nodes in sources():
        where = path.relative_to(ROOT)
        names = {name.split(".")[0] for name in imported(path, nodes)}
        found += [f"{where} imports {name}" for name in names & BANNED_MODULES]
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in BANNED_CALLS or called in {"torch.load", "yaml.load"}:
                found.append(f"{where} calls {called}")
            found += [
                f"{where} passes shell=True"
                for keyword in node.keywords
                if keyword.arg == "shell" and ast.unparse(keyword.value) == "True"
            ]
    assert found == []


def test_tensors_of_floats_state_their_dtype() -> None:
    """torch's default dtype is of the whole process; another thread may change it."""
    names = ("empty", "zeros", "ones", "full", "rand", "randn", "eye")
    makers = {f"torch.{name}" for name in names}
    without = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, nodes in sources()
        if path.relative_to(ROOT).parts[0] in {"kernels", "adapters", "engine"}
        for node in nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in makers
        and not any(keyword.arg == "dtype" for keyword in node.keywords)
    ]
    assert without == []


def test_top_level_folders_hide_no_other_package() -> None:
    assert [layer for layer in LAYERS if (ROOT / layer / "__init__.py").exists()] == []


@pytest.mark.parametrize("layer", LAYERS)
def test_each_folder_is_linked_into_the_package(layer: str) -> None:
    link = ROOT / ".src" / "loraplex" / layer
    assert link.is_symlink()
    assert link.resolve() == ROOT / layer
