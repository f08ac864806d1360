"""`loraplex doctor`: checks an installation and the connection to a server."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import NamedTuple

import httpx
import typer

from ...adapters.confinement import Mechanism
from ...adapters.store import check_usable, open_store
from ...engine.memory.host_memory import available_host_bytes
from ...engine.tuning.trainer_needs import PROCESS_BYTES
from ...engine.tuning.trainer_probe import TrainerReport, probe_trainer
from ...platform.database import Database, database_name
from ..client.errors import ClientError
from ..server.confinement import confinement_here
from ..settings import Settings
from ..tuning.trainer_packages import missing_packages
from .admin import naming_the_database
from .client import open_client
from .connection import find_connection, find_url
from .exit_codes import ExitCode
from .output import AsJson, print_json, print_rows
from .setting_options import DatabaseUrl, DataDir, StoreUrl, Tuning, TuningDevice
from .setting_sources import ConfigFile, settings_of

app = typer.Typer(add_completion=False)

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
MIN_FREE_BYTES = 1 << 30
MAX_CLOCK_SECONDS = 60.0
ENGINE_PACKAGES = ("torch", "transformers", "safetensors")


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    state: str
    """`ok`, `warning`, `failed`, or `skipped` if it is not configured here."""
    what: str


@app.command()
def doctor(
    context: typer.Context,
    database: DatabaseUrl = None,
    store: StoreUrl = None,
    data_dir: DataDir = None,
    tuning: Tuning = None,
    tuning_device: TuningDevice = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check packages, device, confinement, storage and server (read-only)."""
    settings = settings_of(
        context,
        database=database,
        store=store,
        data_dir=data_dir,
        tuning=tuning,
        tuning_device=tuning_device,
    )
    findings = [
        *_installation(),
        *_confinement(),
        *_trainer(settings),
        *_storage(settings),
        *_server(),
    ]
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_rows([finding._asdict() for finding in findings], Finding._fields)
    if any(finding.state == FAILED for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def _installation() -> Iterator[Finding]:
    yield Finding("python", OK, f"{platform.python_version()} on {platform.platform()}")
    for name in ENGINE_PACKAGES:
        if importlib.util.find_spec(name) is None:
            missing = f"not installed: pip install 'loraplex[engine]' where `{name}` is to serve"
            yield Finding(name, WARNING, missing)
        else:
            yield Finding(name, OK, version(name))
    yield Finding("device", OK, _device())
    if importlib.util.find_spec("torch") is not None:
        yield _look("CPU kernels", _cpu_kernels)


def _cpu_kernels() -> Finding:
    """What computes on the CPU, and compiles it where that has not been done."""
    from ...kernels.cpu_library import cpu_library  # needs torch

    library = cpu_library()
    if library.functions is not None:
        return Finding("CPU kernels", OK, library.detail)
    slower = f"{library.detail}: the CPU serves with PyTorch's operations, which take longer"
    return Finding("CPU kernels", WARNING, slower)


def _device() -> str:
    if importlib.util.find_spec("torch") is None:
        return f"{os.cpu_count()} processors"
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return f"{torch.cuda.get_device_name()}, {free >> 30} of {total >> 30} GiB free"
    return f"{os.cpu_count()} processors, {torch.backends.cpu.get_cpu_capability()}"


def _confinement() -> Iterator[Finding]:
    """What confines examinations that this user starts on this machine."""
    report = confinement_here()
    missing = {state.name for state in report.missing}
    for state in report.mechanisms:
        is_optional = state.name == Mechanism.SECCOMP and not state.is_in_force
        mood = WARNING if state.name in missing else SKIPPED if is_optional else OK
        yield Finding(f"confinement: {state.name}", mood, state.detail)
    if report.possible:
        acts = ", ".join(act.act for act in report.possible)
        mood = WARNING if missing else OK
        yield Finding("confinement: open", mood, f"an examination still could: {acts}")


def _trainer(settings: Settings) -> Iterator[Finding]:
    """Whether trainers of fine-tuning jobs can work on this machine."""
    if not settings.tuning:
        off = "--tuning is off; `loraplex doctor --tuning` checks this machine for it"
        yield Finding("trainer", SKIPPED, off)
        return
    if missing := missing_packages():
        need = f"needs {' and '.join(missing)}: pip install 'loraplex[engine,tune]'"
        yield Finding("trainer", FAILED, need)
        return
    device = settings.tuning_device
    try:
        report = probe_trainer(device)
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        yield Finding("trainer", FAILED, f"no trainer could be started: {exc}")
        return
    yield _trainer_packages(report, device)
    yield _trainer_confinement(report)
    yield _trainer_memory()


def _trainer_packages(report: TrainerReport, device: str) -> Finding:
    if report.obstacle is not None:
        return Finding("trainer", FAILED, report.obstacle)
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return Finding("trainer", OK, f"{versions}; device {device}")


def _trainer_confinement(report: TrainerReport) -> Finding:
    reasons = [f"{name} ({reason})" for name, reason in report.refusals.items()]
    if reasons:
        return Finding("trainer confinement", WARNING, f"trainers run without {'; '.join(reasons)}")
    if report.possible:
        acts = ", ".join(report.possible)
        return Finding("trainer confinement", WARNING, f"a trainer still could: {acts}")
    return Finding("trainer confinement", OK, "no network, no other files, no other programs")


def _trainer_memory() -> Finding:
    """Of this machine; a CUDA device's is in the finding `device`."""
    free = available_host_bytes()
    what = f"{free >> 20} MiB of host memory are free; `loraplex plan --tuning` says what jobs take"
    return Finding("trainer memory", OK if free > PROCESS_BYTES else FAILED, what)


def _storage(settings: Settings) -> Iterator[Finding]:
    folder = settings.data_dir
    if not folder.is_dir() and settings.database is None:
        yield Finding("data folder", SKIPPED, f"{folder} does not exist: no server uses it")
        return
    yield _look("data folder", lambda: _data_folder(settings))
    yield _look("database", lambda: _database(settings))
    yield _look("store", lambda: _store(settings))


def _data_folder(settings: Settings) -> Finding:
    folder = settings.data_dir
    if not folder.is_dir():
        return Finding("data folder", WARNING, f"{folder} will be created by the first command")
    if folder.stat().st_mode & 0o077:
        return Finding(
            "data folder", FAILED, f"{folder} is accessible to other users: chmod 700 {folder}"
        )
    free = shutil.disk_usage(folder).free
    state = OK if free >= MIN_FREE_BYTES else FAILED
    return Finding("data folder", state, f"{folder}, {free >> 20} MiB free on its disk")


def _database(settings: Settings) -> Finding:
    opened = Database(settings.database_url)
    try:
        with naming_the_database(settings):
            opened.check_revision()
    finally:
        opened.close()
    return Finding("database", OK, database_name(settings.database_url))


def _store(settings: Settings) -> Finding:
    opened = open_store(settings.store_url)
    check_usable(opened)
    return Finding("store", OK, settings.store_url.partition("?")[0])


def _server() -> Iterator[Finding]:
    url = find_url()
    reached = _look("server", lambda: _reach(url))
    yield reached
    if reached.state == FAILED:
        return
    yield _look("key", lambda: _key(url))
    yield from _fused_layers()


def _reach(url: str) -> Finding:
    try:
        answer = httpx.get(f"{url}/ready", timeout=5.0)
    except httpx.TransportError as exc:
        reason = f"{url} is not reachable ({exc}): check that it runs, and LORAPLEX_URL"
        return Finding("server", FAILED, reason)
    skew = _clock_skew(answer)
    if abs(skew) > MAX_CLOCK_SECONDS:
        return Finding("server", WARNING, f"{url}: its clock differs by {skew:+.0f} s")
    if answer.is_success:
        return Finding("server", OK, f"{url} accepts requests")
    return Finding("server", WARNING, f"{url}: {answer.json()['error']['message']}")


def _clock_skew(answer: httpx.Response) -> float:
    if "date" not in answer.headers:
        return 0.0
    return (parsedate_to_datetime(answer.headers["date"]) - datetime.now(UTC)).total_seconds()


def _key(url: str) -> Finding:
    try:
        find_connection()
    except ClientError as exc:
        return Finding("key", SKIPPED, str(exc))
    with open_client() as client:
        me = client.get("/me")
    tenant = me["tenant"]["slug"] if me["tenant"] else "no tenant"
    return Finding("key", OK, f"{me['actor']['kind']} {me['actor']['name']}, {tenant}")


def _fused_layers() -> Iterator[Finding]:
    """Which layers of the served base run fused; nothing without an operator's key."""
    try:
        with open_client() as client:
            servers = client.admin.get("/memory")["servers"]
    except (ClientError, ValueError):  # the findings above say what is wrong
        return
    for each in servers:
        for line in each.get("plan", ()):  # an older server tells none
            if line.startswith("fused: "):
                yield Finding("fused layers", OK, line.removeprefix("fused: "))


def _look(check: str, look: Callable[[], Finding]) -> Finding:
    """What the look finds; that it fails is a finding."""
    try:
        return look()
    except Exception as exc:  # the other checks run after any failure
        reason = next(iter(str(exc).splitlines()), "") or type(exc).__name__
        return Finding(check, FAILED, reason)
