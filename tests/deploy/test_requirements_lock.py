"""The image's packages are pinned with hashes, within the ranges of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "deploy" / "requirements.lock"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
EXTRAS = ("engine", "postgres", "otel", "eval")
"""What the image installs."""
LEFT_OUT = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""Of these the image has the build for its TORCH_BACKEND."""


def pinned() -> dict[str, list[str]]:
    """The lock's lines by package: the requirement, then its hashes."""
    whole = LOCK.read_text().replace("\\\n", " ")
    lines = [line.split(" --hash=") for line in whole.splitlines() if re.match(r"\w", line)]
    return {canonicalize_name(Requirement(line[0]).name): line for line in lines}


def required() -> Iterator[Requirement]:
    """What pyproject.toml asks for in the image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]:
        yield Requirement(line)


def test_every_requirement_is_pinned_within_its_range() -> None:
    pins = pinned()
    for requirement in required():
        if LEFT_OUT.fullmatch(requirement.name):
            continue
        (pin,) = Requirement(pins[canonicalize_name(requirement.name)][0]).specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement}: run `make lock`"


def test_every_package_has_hashes_and_no_address() -> None:
    pins = pinned()
    assert len(pins) > 40
    assert [name for name in pins if LEFT_OUT.fullmatch(name)] == []
    for line, *hashes in pins.values():
        assert hashes, line
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64} *", each) for each in hashes), line
    assert "://" not in LOCK.read_text()


def test_the_image_has_the_programs_of_the_backup_scripts() -> None:
    system = (ROOT / "deploy" / "image" / "system.sh").read_text()
    scripts = [
        (ROOT / "deploy" / "operations" / f"{name}.sh").read_text()
        for name in ("backup", "restore")
    ]
    packages = {"pg_dump": "postgresql-client", "pg_restore": "postgresql-client", "aws": "awscli"}
    for program, package in packages.items():
        assert any(f"{program} " in script for script in scripts)
        assert f" {package}" in system
    assert "COPY deploy/image/system.sh" in DOCKERFILE.read_text()


def test_the_image_installs_what_is_locked() -> None:
    dockerfile = DOCKERFILE.read_text()
    assert "RUN deploy/image/packages.sh /opt/loraplex\n" in dockerfile
    script = (ROOT / "deploy" / "image" / "packages.sh").read_text()
    assert "--constraints deploy/requirements.lock" in script
    assert f"ARG EXTRAS={','.join(EXTRAS)}\n" in dockerfile
    assert '".${EXTRAS:+[$EXTRAS]}"' in script
