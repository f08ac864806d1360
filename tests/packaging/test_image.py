"""The steps of the image, in a clean environment: `make image-check` runs them before."""

from __future__ import annotations

import os
import re
from importlib.metadata import distributions
from pathlib import Path

import httpx
import pytest
from packaging.utils import canonicalize_name

from loraplex.platform.version import __version__
from support.clean_environment import Environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LORAPLEX_IMAGE_VENV" not in os.environ, reason="make image-check runs it"),
]
ROOT = Path(__file__).parents[2]
SMALL = ("--num-threads", "1", "--memory-gib", "0.5", "--host-cache-gib", "0.05")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


@pytest.fixture(scope="module")
def image() -> Environment:
    """What deploy/image/packages.sh has made."""
    return Environment(Path(os.environ["LORAPLEX_IMAGE_VENV"]).resolve())


@pytest.fixture(scope="module")
def whole(image: Environment) -> Environment:
    """The same with the engine. Runs after the tests that need it without."""
    image.link_engine()
    return image


def test_every_package_has_the_version_of_the_lock(image: Environment) -> None:
    lock = (ROOT / "deploy" / "requirements.lock").read_text()
    locked = {canonicalize_name(name): version for name, version in PIN.findall(lock)}
    installed = {
        canonicalize_name(each.metadata["Name"]): each.version
        for each in distributions(path=[str(image.packages)])
    }
    assert installed.pop(canonicalize_name("loraplex")) == __version__
    assert len(installed) > 30
    others = {name for name, version in installed.items() if locked.get(name) != version}
    # The lock is for the Python of the image; older ones need backports.
    assert others <= {"async-timeout", "backports-tarfile", "typing-extensions"} - set(locked)


def test_answers_are_checked_against_schemas_and_patterns(image: Environment) -> None:
    """Of golden sets: this needs the extra `eval`."""
    code = (
        "from loraplex.api.evaluation.constraints import matches_pattern, matches_schema\n"
        "follows = matches_schema({'type': 'object', 'required': ['total']})\n"
        "print(follows('{\"total\": 3}'), follows('{}'), matches_pattern('^a+$')('aa'))\n"
    )
    done = image.run("python", "-P", "-c", code)
    assert (done.returncode, done.stdout) == (0, "True False True\n"), done.stderr


def test_a_server_answers_and_its_backup_has_its_operators(whole: Environment) -> None:
    base = whole.packages / "loraplex" / "api" / "demo" / "weights" / "base"
    data, restored = str(whole.folder / "data"), str(whole.folder / "restored")
    create_operator = ("operators", "create", "root", "--data-dir")
    with whole.serving(str(base), *SMALL, "--data-dir", data) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.get(f"{url}/ready").status_code == 200
        assert whole.loraplex(*create_operator, data).returncode == 0
        backup = str(whole.folder / "backup")
        made = whole.run("loraplex-backup", backup, LORAPLEX_DATA_DIR=data)
    assert made.returncode == 0, made.stderr
    done = whole.run("loraplex-restore", backup, LORAPLEX_DATA_DIR=restored)
    assert done.returncode == 0, done.stderr
    again = whole.loraplex(*create_operator, restored)
    assert again.returncode != 0
    assert "'root' already exists" in again.stderr
