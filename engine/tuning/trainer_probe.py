"""Measures whether a trainer can work on this machine, confined as it is for a job. Torch-free but
for the child.

The child confines itself, tries what must fail, and imports what training needs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .confinement import confine_to
from .environment import trainer_environment

WALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """What the child found."""

    refusals: dict[str, str]
    """The unavailable mechanisms, each with the reason."""
    possible: list[str]
    """Acts that confinement should prevent."""
    versions: dict[str, str]
    """Of the packages that training needs, as they were imported under confinement."""
    obstacle: str | None
    """Why nothing can be trained; None: it can be."""


def probe_trainer(device: str) -> TrainerReport:
    """Start the child; takes some seconds. Raises OSError, ValueError or
    subprocess.SubprocessError if it cannot be measured."""
    with tempfile.TemporaryDirectory(prefix="loraplex-probe-") as name, socket.socket() as listener:
        folder = Path(name)
        for part in ("inside", "outside"):
            (folder / part).mkdir()
        (folder / "outside" / "secret").write_bytes(b"secret")
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        question = {
            "folder": name,
            "device": device,
            "port": listener.getsockname()[1],
        }
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            cwd=folder / "inside",
            env={**trainer_environment(os.environ), "HOME": name, "TMPDIR": f"{name}/inside"},
            timeout=WALL_SECONDS,
            check=False,
        )
    if done.returncode:
        raise ValueError(f"the probe ended with status {done.returncode}: {done.stderr[-300:]}")
    return TrainerReport(**json.loads(done.stdout))


# --- in the child -------------------------------------------------------------------------------


def main() -> None:
    question = json.load(sys.stdin)
    folder, device = Path(question["folder"]), question["device"]
    refusals = confine_to(read=(), write=[folder / "inside"], device=device)
    secret = folder / "outside" / "secret"
    acts: dict[str, Callable[[], object]] = {
        "connect_tcp": lambda: socket.create_connection(("127.0.0.1", question["port"]), 1.0),
        "read_file": secret.read_bytes,
        "write_file": lambda: secret.write_bytes(b"x"),
        "execute": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    }
    found = {
        "refusals": dict(refusals),
        "possible": [name for name, act in acts.items() if _is_possible(act)],
    }
    try:
        versions, obstacle = _import_packages(), _device_obstacle(device)
    except Exception as exc:  # whatever it is, a trainer would meet it
        versions, obstacle = {}, f"{type(exc).__name__}: {exc}"
    print(json.dumps({**found, "versions": versions, "obstacle": obstacle}))  # noqa: T201


def _is_possible(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


def _import_packages() -> dict[str, str]:
    import accelerate
    import peft
    import torch

    return {module.__name__: str(module.__version__) for module in (torch, peft, accelerate)}


def _device_obstacle(device: str) -> str | None:
    from ..errors import InvalidParameter
    from ..model.base_model import choose_device

    try:
        choose_device(device)
    except InvalidParameter as exc:
        return str(exc)
    return None


if __name__ == "__main__":
    main()
